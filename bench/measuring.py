"""Measure the cost of measuring. Alternate steps with and without probes, and time the probes and
background threads.

    python bench/measuring.py [WORKLOAD [PRECISION [STEPS]]]

One process trains. Without probes, it does not mark, record, write, or sample anything. The ratio
is the cost that a user sees. If machine noise hides the ratio, the second number is an upper bound
on the cost: the time spent in all recording calls, including their timers. (On a GPU, that number
also includes waiting for room in the device queue, so use only the ratio.)
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from paralab.experiment.planning import make_plan
from paralab.plan.plan import Plan
from paralab.plan.request import Request
from paralab.record.status_board import StatusBoard
from paralab.record.writer import EventWriter
from paralab.worker import loop, rank_context
from paralab.worker.measure import device_load as load
from paralab.worker.measure import probes
from paralab.worker.measure.clock import Clock
from paralab.workload.load import load_workload
from paralab.workload.workload import Workload

WARM_UP = 20
ROUNDS = 5
NOTING = (
    (probes.Probe, ("note", "begin_step", "end_step", "emit")),
    (Clock, ("mark",)),
)

spent = 0.0
inside = threading.local()


class Quiet(probes.Probe):
    """A probe that does not record anything."""

    detailed = False

    def emit(self, event, **fields):
        pass

    def note(self, event, start, end, **fields):
        pass

    def begin_step(self, step):
        self.step = step

    def end_step(self, loss, **fields):
        pass


class NoSampler:
    def __init__(self, rank, probe):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


class Stopwatch:
    """Record the time after warm-up and after the last step, when the device is idle."""

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.steps = warm_up, steps
        self.marks: list[float] = []
        self.loss = 0.0  # the loss of the last step

    def end_step(self, step: int, loss: torch.Tensor) -> None:
        if step in (self.warm_up - 1, self.steps - 1):
            self.loss = loss.item()  # waits for the device
            self.marks.append(time.perf_counter())

    @property
    def step_seconds(self) -> float:
        start, end = self.marks
        return (end - start) / (self.steps - self.warm_up)


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


def train(
    workload: Workload,
    plan: Plan,
    stopwatch: Stopwatch,
    probe_class: type = probes.Probe,
    sampler: type = load.LoadSampler,
) -> None:
    """Train in this process, with this kind of probe and load sampler."""

    class Watched(probe_class):
        def end_step(self, loss, **fields):
            super().end_step(loss, **fields)
            stopwatch.end_step(self.step, loss)

    rank_context.Probe, loop.LoadSampler = Watched, sampler
    with tempfile.TemporaryDirectory() as folder:
        writer = EventWriter(Path(folder, "rank0.jsonl"))
        board = StatusBoard.create(Path(folder, "board"), 1)
        loop.train(workload, plan, 0, writer, time.perf_counter(), loop.Extras(), board)
        writer.close()


def step_seconds(plan: Plan, probe_class: type, sampler: type) -> float:
    stopwatch = Stopwatch(WARM_UP, plan.num_steps)
    train(load_workload(plan.workload), plan, stopwatch, probe_class, sampler)
    return stopwatch.step_seconds


def main() -> None:
    global spent
    workload = sys.argv[1] if len(sys.argv) > 1 else "mlp"
    precision = sys.argv[2] if len(sys.argv) > 2 else "fp32"
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 200
    plans = []
    for strategy in ("single", "pipeline"):
        plan, _ = make_plan(Request(strategy, workload, steps=steps, precision=precision))
        plans.append(Plan.from_json(json.loads(json.dumps(plan.to_json()))))
    ratios = {}
    for plan in plans:
        pairs = []
        for number in range(ROUNDS):
            sides = [(probes.Probe, load.LoadSampler), (Quiet, NoSampler)]
            seconds = {
                side[0]: step_seconds(plan, *side)
                for side in (sides if number % 2 else sides[::-1])
            }
            pairs.append(seconds[probes.Probe] / seconds[Quiet])
        ratios[plan.strategy] = pairs
    for cls, names in NOTING:
        for name in names:
            timed(cls, name)
    totals: list[float] = []
    side_thread(load.LoadSampler, "_sample", totals)
    side_thread(EventWriter, "_work", totals)
    for plan in plans:
        spent = 0.0
        totals.clear()
        step = step_seconds(plan, probes.Probe, load.LoadSampler)
        pairs = ratios[plan.strategy]
        print(
            f"{plan.strategy:<9} {plan.workload} {precision}: step {step * 1e3:.2f} ms; with probes / without "
            f"{statistics.median(pairs):.4f} ({min(pairs):.4f}-{max(pairs):.4f}); in probes {spent / step / steps:.2%}, "
            f"background threads {sum(totals) / step / steps:.2%} of a core; torch {torch.__version__}",
            flush=True,
        )


if __name__ == "__main__":
    main()
