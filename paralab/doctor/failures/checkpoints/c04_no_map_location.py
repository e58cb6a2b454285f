"""C04: torch.load without map_location."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator

from paralab.doctor.events import Load
from paralab.doctor.failures.checkpoints.files import is_own_path, loads_of_files
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.report import add_keyword, code, found
from paralab.doctor.static.script import Script
from paralab.doctor.static.ways import arrives, excludes, starts_of_job, ways_to

ENTRY = Entry(
    id="C04",
    title="torch.load without map_location",
    symptom="Every rank puts a copy of the checkpoint on GPU 0, which then runs out of memory.",
    cause="torch.load puts tensors back on the device they were saved from, usually rank 0's.",
    fix="Pass `map_location='cpu'`, or the rank's own device.",
    example="""\
- state = torch.load("net.pt")
+ state = torch.load("net.pt", map_location="cpu")
""",
    limits="Only visible on GPUs.",
)
_CHECKPOINT = re.compile(r"resum|checkpoint|ckpt|snapshot|last|latest|best|restart|continue", re.I)
_PRETRAINED = re.compile(r"pretrain|init|vgg|lpips|inception|imagenet|teacher|weights", re.I)
_ON_NO_DEVICE = {"scaler", "scheduler", "sampler"}  # their state holds no tensors on a GPU


@check("C04", source="script")
def no_map_location(script: Script) -> Iterator[Finding]:
    """Report a load on every rank whose tensors return to the GPU they were saved from."""
    starts = starts_of_job(script) if script.calls_of("torch.load") else []
    if not starts or not _uses_cuda(script):
        return
    states = [
        (state, load)
        for state, load in loads_of_files(script)
        if script.kinds(state.receiver, state.scope).isdisjoint(_ON_NO_DEVICE)
    ]
    for call in script.calls_of("torch.load"):
        path = call.argument(0, "f")
        if path is None or call.argument(1, "map_location") is not None or call.unpacks:
            continue
        if is_own_path(script, path, call.scope):
            continue  # saved by the same rank, from the same GPU
        loaded = [state for state, load in states if load is call]
        ways = [
            (way, arrives(script, way, 1).taken)
            for way in ways_to(script, call)
            if any(not excludes(way, start) for start in starts)
        ]
        if not loaded or all(taken is False for _, taken in ways):
            continue
        text = f"{code(call.node, 200)} {call.scope.name} {' '.join(code(one.node, 200) for one in loaded)}"
        own = "optimizer" in text.lower() or bool(_CHECKPOINT.search(text))
        certain = (
            own and not _PRETRAINED.search(text) and any(way.known and taken for way, taken in ways)
        )
        why = (
            f"`{code(call.node)}` puts the tensors on the GPU they were saved from, usually GPU 0, so every "
            "rank of the machine keeps a copy there."
        )
        if not certain:
            why += " Certain if the file was saved from a GPU."
        yield found(
            script,
            "C04",
            "warning" if certain else "suspect",
            call,
            why,
            ENTRY.fix,
            edits=add_keyword(script, call, 'map_location="cpu"'),
        )


def _uses_cuda(script: Script) -> bool:
    return bool(
        script.methods("cuda", "set_device")
        or any(
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith(("cuda", "nccl"))
            for module in script.modules
            for node in module.nodes
        )
    )


@check("C04", source="ranks")
def loaded_on_one_gpu(seen: Observation) -> Iterator[Finding]:
    """Report ranks with GPUs that load without map_location."""
    with_gpus = [rank for rank in seen.ranks if rank.start.gpus]
    loads = [(r.rank, e) for r in with_gpus for e in r.of(Load) if e.map_location is None]
    ranks = {rank for rank, _ in loads}
    if len(ranks) > 1:
        name = os.path.basename(loads[0][1].path or "a file")
        why = (
            f"{len(ranks)} ranks load {name} without map_location: the tensors return to the GPU they "
            "were saved from, so that GPU holds a copy for every rank."
        )
        evidence = [f"rank {rank}: {load.path}" for rank, load in loads[:4]]
        yield make_finding("C04", "warning", why, loads[0][1], evidence)
