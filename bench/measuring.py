"""What measuring costs inside a rank: the time spent in probes, and the CPU time of the side threads, as shares of the step.

    python bench/measuring.py [WORKLOAD]

One process trains; every call that notes something is timed on its own, which counts the timers themselves as well.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from paralab.plan.plan import Plan
from paralab.plan.request import Request
from paralab.record.writer import EventWriter
from paralab.training import make_plan
from paralab.worker import load, loop, probes
from paralab.worker.clock import Clock, CudaClock
from paralab.workload.load import load_workload

spent = 0.0
inside = threading.local()


def timed(cls: type, name: str) -> None:
    original = getattr(cls, name)

    def wrapper(*args, **kwargs):
        global spent
        if getattr(inside, "depth", 0):
            return original(*args, **kwargs)
        inside.depth = 1
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent += time.perf_counter() - start
            inside.depth = 0

    setattr(cls, name, wrapper)


def side_thread(cls: type, name: str, totals: list[float]) -> None:
    original = getattr(cls, name)

    def wrapper(*args, **kwargs):
        try:
            return original(*args, **kwargs)
        finally:
            totals.append(time.thread_time())

    setattr(cls, name, wrapper)


def main() -> None:
    global spent
    workload = sys.argv[1] if len(sys.argv) > 1 else "mlp"
    for cls, names in ((probes.Probe, ("note", "begin_step", "end_step", "emit")), (Clock, ("mark",)), (CudaClock, ("mark",))):
        for name in names:
            timed(cls, name)
    totals: list[float] = []
    side_thread(load.LoadSampler, "_sample", totals)
    side_thread(EventWriter, "_work", totals)
    for request in (Request("single", workload, steps=200), Request("pipeline", workload, steps=200)):
        plan, _, _ = make_plan(request)
        plan = Plan.from_json(json.loads(json.dumps(plan.to_json())))
        with tempfile.TemporaryDirectory() as folder:
            writer = EventWriter(Path(folder, "rank0.jsonl"))
            spent, begin = 0.0, time.perf_counter()
            totals.clear()
            loop.train(load_workload(plan.workload), plan, 0, writer, begin, loop.Extras())
            writer.close()
            whole = [json.loads(line) for line in Path(folder, "rank0.jsonl").read_text().splitlines()]
        steps = sum(event["end"] - event["start"] for event in whole if event["event"] == "step")
        print(
            f"{request.strategy:<9} {plan.workload}: 200 steps of {steps / 200 * 1e3:.1f} ms, measuring {spent / steps:.3%}, "
            f"side threads {sum(totals) / steps:.3%} of a core, torch {torch.__version__}",
            flush=True,
        )


if __name__ == "__main__":
    main()
