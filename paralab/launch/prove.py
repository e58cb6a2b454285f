"""Start CPU ranks that prove how layers, sequences, or experts can be split, and wait for their answer."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from paralab.errors import ParalabError, UsageError
from paralab.launch.launched_by import without_launch
from paralab.launch.processes import INSIDE, Child, start
from paralab.machine.host import loopback
from paralab.workload.expert_plan import ExpertPlan
from paralab.workload.sequence_plan import SequencePlan
from paralab.workload.tensor_group import TensorPlan

DEADLINE_SECONDS = 1800
POLL_SECONDS = 0.02
KILLED_SECONDS = 60


SplitPlan = TensorPlan | SequencePlan | ExpertPlan
PLANS: Mapping[str, type[SplitPlan]] = {
    "tensor": TensorPlan,
    "sequence": SequencePlan,
    "expert": ExpertPlan,
}


def prove_plan(what: str, workload: str, shards: int) -> SplitPlan:
    """Prove on `shards` ranks which parts of the workload's model can be split."""
    with tempfile.TemporaryDirectory(prefix="paralab-") as folder:
        spec, answer, log = (Path(folder, name) for name in ("spec.json", "answer.json", "log.txt"))
        rendezvous = f"file://{folder}/rendezvous"
        task = {
            "what": what,
            "workload": workload,
            "shards": shards,
            "rendezvous": rendezvous,
            "answer": str(answer),
        }
        spec.write_text(json.dumps(task))
        environment = {**without_launch(os.environ), INSIDE: "proof", "OMP_NUM_THREADS": "1"}
        if interface := loopback():
            environment["GLOO_SOCKET_IFNAME"] = interface
        ranks: list[Child] = []
        with ExitStack() as ending, log.open("wb") as file:
            for rank in range(shards):
                own = {**environment, "RANK": str(rank)}
                child = start("paralab.worker.prove_shards", [str(spec)], own, file)
                ending.callback(_end, child)
                ranks.append(child)
            code = _wait(ranks, what, workload)
        if code or not answer.exists():
            lines = log.read_text(errors="replace").strip().splitlines()
            problem = f"The ranks that prove the {what} plan exited with code {code}."
            raise ParalabError(problem, detail="\n".join(lines[-15:]))
        return msgspec.json.decode(answer.read_bytes(), type=PLANS[what])


def _wait(ranks: list[Child], what: str, workload: str) -> int:
    """Wait until all ranks exit or one fails. Return 0 or the failed rank's exit code."""
    until = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < until:
        codes = [rank.poll() for rank in ranks]
        if failed := next((code for code in codes if code), None):
            return failed
        if None not in codes:
            return 0
        time.sleep(POLL_SECONDS)
    problem = f"Proving a {what} plan for {workload} took more than {DEADLINE_SECONDS} s."
    raise UsageError(problem, fix="a smaller model, or ddp or fsdp")


def _end(child: Child) -> None:
    child.kill()
    with suppress(subprocess.TimeoutExpired):  # it may be waiting for a broken disk
        child.wait(KILLED_SECONDS)
    if child.stdin:
        child.stdin.close()
