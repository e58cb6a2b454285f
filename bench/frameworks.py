"""Compare one training step: a hand-written loop, paralab, Accelerate, and Lightning Fabric, each
eager and with its repeated blocks compiled.

    python bench/frameworks.py                                               gpt:124m, bf16, batch 16
    python bench/frameworks.py --workload gpt:tiny --precision fp32 --batch-size 32

One process trains all of them in turn, in a new random order in each round, from the same initial
weights, on the same batches from the same loader. The time includes loading. The script leaves out
a framework that is not installed, and prints a Markdown table. It fails if the last losses differ.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from bench.handwritten import Loop, train_step, write_by_hand  # noqa: E402
from bench.measuring import Stopwatch, train  # noqa: E402
from paralab.errors import ParalabError  # noqa: E402
from paralab.experiment.planning import make_plan, resolve_here  # noqa: E402
from paralab.plan.batches import global_batches  # noqa: E402
from paralab.plan.plan import Plan  # noqa: E402
from paralab.plan.request import Request  # noqa: E402
from paralab.worker.samples import rank_batches  # noqa: E402
from paralab.workload.load import load_workload  # noqa: E402
from paralab.workload.workload import Workload  # noqa: E402

WARM_UP = 5  # steps
AGREEMENT = {"fp32": 1e-3, "bf16": 2e-2}  # largest relative difference between the last losses
Make = Callable[[Any, Workload, str, str], Loop]
Measurement = tuple[float, float]  # seconds per step, and the last loss


def use_accelerate(model: Any, workload: Workload, device: str, precision: str) -> Loop:
    from accelerate import Accelerator

    mixed = "bf16" if precision == "bf16" else "no"
    accelerator = Accelerator(mixed_precision=mixed, cpu=device == "cpu")
    model, optimizer = accelerator.prepare(model, workload.optimizer(model.parameters()))
    return Loop(model, optimizer, accelerator.autocast, accelerator.backward)


def use_fabric(model: Any, workload: Workload, device: str, precision: str) -> Loop:
    from lightning.fabric import Fabric

    mixed = "bf16-mixed" if precision == "bf16" else "32-true"
    fabric = Fabric(accelerator=device, devices=1, precision=mixed)
    model, optimizer = fabric.setup(model, workload.optimizer(model.parameters()))
    return Loop(model, optimizer, fabric.autocast, fabric.backward)


HAND, PARALAB = "hand-written", "paralab single"
LOOPS: dict[str, tuple[str, Make]] = {  # name: the package that it needs, and how to set it up
    HAND: ("torch", write_by_hand),
    "Accelerate": ("accelerate", use_accelerate),
    "Lightning Fabric": ("lightning", use_fabric),
}


def measure_loop(make: Make, workload: Workload, plan: Plan) -> Measurement:
    stopwatch = Stopwatch(WARM_UP, plan.num_steps)
    torch.set_num_threads(plan.threads_per_device)
    model = workload.model().to(plan.device)
    for name in plan.compiled:
        model.get_submodule(name).compile()
    loop = make(model, workload, plan.device, plan.precision)
    steps = global_batches(plan.batch_size, plan.samples, plan.steps, plan.epochs)
    on_gpu = plan.device == "cuda"
    batches = rank_batches(workload, steps, samples=plan.samples, seed=plan.seed, pin_memory=on_gpu)
    for batch, tensors in batches:
        x, y = (tensor.to(plan.device, non_blocking=True) for tensor in tensors)
        stopwatch.end_step(batch.step, train_step(loop, workload, x, y))
    return stopwatch.step_seconds, stopwatch.loss


def measure_paralab(workload: Workload, plan: Plan) -> Measurement:
    stopwatch = Stopwatch(WARM_UP, plan.num_steps)
    train(workload, plan, stopwatch)
    return stopwatch.step_seconds, stopwatch.loss


def measure(name: str, workload: Workload, plan: Plan) -> Measurement:
    """Measure in a clean process state."""
    torch._dynamo.reset()
    gc.collect()
    if plan.device == "cuda":
        torch.cuda.empty_cache()
    if name == PARALAB:
        return measure_paralab(workload, plan)
    return measure_loop(LOOPS[name][1], workload, plan)


def make_plans(options: argparse.Namespace) -> list[Plan]:
    """Return the eager and the compiled configuration."""
    request = Request(
        "single",
        options.workload,
        batch_size=options.batch_size,
        steps=WARM_UP + options.steps,
        precision=options.precision,
        compile=True,
    )
    compiled, inspected = make_plan(request)
    return [resolve_here(replace(request, compile=False), inspected), compiled]


def run_rounds(
    names: list[str], plans: list[Plan], options: argparse.Namespace
) -> Iterator[dict[tuple[str, bool], float]]:
    """Yield each round's seconds per step, by name and whether blocks are compiled."""
    workload = load_workload(plans[0].workload)
    torch.manual_seed(0)
    initial = workload.model()
    workload = replace(workload, model=lambda: copy.deepcopy(initial))
    cases = [(name, plan) for name in names for plan in plans]
    started = time.perf_counter()
    for number in range(options.rounds):
        round_started = time.perf_counter()
        random.Random(number).shuffle(cases)
        found = {(name, plan.compile): measure(name, workload, plan) for name, plan in cases}
        check_losses(found, AGREEMENT[options.precision])
        yield {case: seconds for case, (seconds, _) in found.items()}
        now = time.perf_counter()
        print(f"round {number + 1}: {now - round_started:.0f} s", file=sys.stderr, flush=True)
        if now - started + (now - round_started) > options.seconds:
            return


def check_losses(found: dict[tuple[str, bool], Measurement], most: float) -> None:
    """All cases must train the same way, or a comparison means nothing."""
    losses = {case: loss for case, (_, loss) in found.items()}
    own = losses[HAND, False]
    wrong = {case: loss for case, loss in losses.items() if not abs(loss - own) <= most * own}
    if wrong:
        raise SystemExit(f"the last loss of {HAND} is {own}, but these differ: {wrong}")


def print_table(rounds: list[dict[tuple[str, bool], float]], names: list[str]) -> None:
    print("| | eager | ÷ hand-written | blocks compiled | ÷ hand-written compiled |")
    print("|---|---|---|---|---|")
    for name in names:
        cells = [name]
        for compiled in (False, True):
            times = [each[name, compiled] for each in rounds]
            ratios = [each[name, compiled] / each[HAND, compiled] for each in rounds]
            cells.append(f"{statistics.median(times) * 1e3:.2f} ms")
            spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})"
            cells.append("1" if name == HAND else spread)
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="gpt:124m")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--precision", choices=AGREEMENT, default="bf16")
    parser.add_argument("--steps", type=int, default=30, help="per measurement, after warm-up")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=140, help="start no round past this time")
    options = parser.parse_args()
    missing = [name for name, (package, _) in LOOPS.items() if find_spec(package) is None]
    for name in missing:
        print(f"{name} is not installed: left out", flush=True)
    names = [HAND, PARALAB, *(name for name in LOOPS if name not in (HAND, *missing))]
    try:
        rounds = list(run_rounds(names, make_plans(options), options))
    except ParalabError as error:
        raise SystemExit(str(error)) from None
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{options.workload}, {options.precision}, batch {options.batch_size}, {len(rounds)} rounds "
        f"of {options.steps} steps; {where}, torch {torch.__version__}"
    )
    print_table(rounds, names)
    sys.stdout.flush()
    os._exit(0)  # frameworks may leave threads


if __name__ == "__main__":
    main()
