"""C04: torch.load without map_location.

Symptom: Every rank puts a copy of the checkpoint on GPU 0, which then runs out of memory.
Cause: torch.load puts tensors back on the device they were saved from, usually rank 0's.
Fix: Pass `map_location='cpu'`, or the rank's own device.
Limits: Only visible on GPUs.

- state = torch.load("net.pt")
+ state = torch.load("net.pt", map_location="cpu")
"""

import os
import re

from paralab.doctor.events import Load
from paralab.doctor.failures.checkpoints.files import is_own_path, loads_of_files
from paralab.doctor.failures.launch.devices import relies_on_one_gpu
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.hints import is_for_one_rank, is_parallel
from paralab.doctor.static.report import add_keyword, code, found
from paralab.doctor.static.script import Script
from paralab.doctor.static.ways import arrives, excludes, starts_of_job, ways_to

ENTRY = describe(__doc__)
_CHECKPOINT = re.compile(r"resum|checkpoint|ckpt|snapshot|last|latest|best|restart|continue", re.I)
_PRETRAINED = re.compile(r"pretrain|init|vgg|lpips|inception|imagenet|teacher|weights", re.I)
_LOADS = re.compile(r"^_?(load|restore)(_model|_state\w*|_weights|_network)?$", re.I)
_DOWNLOADS = re.compile(r"download|urlretrieve|wget", re.I)
_ALONE = re.compile(r"test|eval|demo|infer|convert|export|sampl|predict|generat", re.I)
_ON_NO_DEVICE = {"scaler", "scheduler", "sampler"}  # their state contains no GPU tensors


@check("C04", source="script")
def no_map_location(script: Script) -> Findings:
    """Report a load on every rank whose tensors return to the GPU they were saved from."""
    every = [call for call in script.calls_of("torch.load") if not _names_device(script, call)]
    starts = starts_of_job(script) if every and _uses_cuda(script) else []
    states = [
        (state, load)
        for state, load in loads_of_files(script)
        if script.kinds(state.receiver, state.scope).isdisjoint(_ON_NO_DEVICE)
    ]
    reported = False
    for call in every if starts else ():
        loaded = [state for state, load in states if load is call]
        ways = [
            (way, arrives(script, way, 1).taken)
            for way in ways_to(script, call)
            if any(not excludes(way, start) for start in starts)
        ]
        if not loaded or all(taken is False for _, taken in ways):
            continue
        text = f"{code(call.node, 200)} {call.scope.name} {' '.join(code(one.node, 200) for one in loaded)}"
        own = "optimizer" in text.lower() or _CHECKPOINT.search(text)
        reached = any(way.known and taken for way, taken in ways)
        published = any(_DOWNLOADS.search(one.method) for one in script.calls_in(call.scope))
        certain = own and not published and not _PRETRAINED.search(text) and reached
        reported = True
        doubt = "if a rank sees multiple GPUs" if relies_on_one_gpu(script) else ""
        yield _finding(script, call, doubt if certain else "if the file was saved from a GPU")
    if not reported and is_parallel(script) and not _ALONE.search(script.path.stem):
        for call in every:  # the script may not show how the state reaches the model
            tests = [(one.test, one.taken) for one in call.inside(If)]
            text = " ".join(code(one, 200) for one in (call.node, *(test for test, _ in tests)))
            text = f"{text} {call.scope.name}"
            known = _CHECKPOINT.search(text) or _LOADS.search(call.scope.name)
            if known and not any(is_for_one_rank(*one) for one in tests):
                yield _finding(
                    script, call, "if multiple ranks on one machine load a file saved from a GPU"
                )


def _finding(script: Script, call: Call, doubt: str) -> Finding:
    why = (
        f"`{code(call.node)}` puts the tensors on the GPU they were saved from, usually GPU 0, so "
        "every rank on the machine keeps a copy there."
    )
    edits = add_keyword(script, call, 'map_location="cpu"')
    return found(script, "C04", "warning", call, why, doubt=doubt, edits=edits)


def _names_device(script: Script, call: Call) -> bool:
    """Return whether a load names a device, or reads a file that the same rank saved."""
    path = call.argument(0, "f")
    if path is None or call.argument(1, "map_location") is not None or call.unpacks:
        return True
    return is_own_path(script, path, call.scope)


def _uses_cuda(script: Script) -> bool:
    named = any(text.startswith(("cuda", "nccl")) for text in script.strings)
    return named or bool(script.methods("cuda", "set_device"))


@check("C04", source="ranks")
def loaded_on_one_gpu(seen: Observation) -> Findings:
    with_gpus = [rank for rank in seen.ranks if rank.start.gpus]
    loads = [(r.rank, e) for r in with_gpus for e in r.of(Load) if e.map_location is None]
    ranks = {rank for rank, _ in loads}
    if len(ranks) > 1:
        name = os.path.basename(loads[0][1].path or "a file")
        why = (
            f"{len(ranks)} ranks load {name} without map_location. The tensors return to the GPU they "
            "were saved from, so that GPU holds a copy for every rank."
        )
        yield make_finding("C04", "warning", why, loads[0][1])
