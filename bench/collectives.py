"""Compare the backend `local` with gloo on CPU ranks: single all-reduces, and whole DDP steps.

    python bench/collectives.py [RANKS]

Both backends take turns in the same processes, so noise affects both. All times and ratios are
medians over the rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paralab.collectives  # noqa: F401

ROOT = Path(__file__).parent.parent
ROUNDS = 7
SIZES_MB = (0.001, 1.0, 25.0, 100.0)
BATCHES = (64, 256)  # samples per step over all ranks


def all_reduce(group: dist.ProcessGroup, megabytes: float) -> Callable[[], object]:
    tensor = torch.zeros(int(megabytes * 2**20 / 4))
    return lambda: dist.all_reduce(tensor, group=group)


def ddp_step(group: dist.ProcessGroup | None, batch: int) -> Callable[[], object]:
    """Return a step of a 6-layer, 1024-wide MLP with 25 MB of gradients. Without a group, the step
    does not communicate."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(batch // dist.get_world_size(), 1024)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    def alone() -> None:
        with model.no_sync():
            step()

    return step if group else alone


def measure(step: Callable[[], object], repeat: int) -> float:
    """Return the seconds per call."""
    step()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    return (time.perf_counter() - start) / repeat


def rank() -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in ("local", "gloo")}
    cases = [(f"all-reduce {size:g} MB", all_reduce, size) for size in SIZES_MB]
    cases += [(f"ddp step, batch {batch}", ddp_step, batch) for batch in BATCHES]

    for name, make, value in cases:
        steps = {backend: make(group, value) for backend, group in groups.items()}
        if make is ddp_step:
            steps["alone"] = ddp_step(None, int(value))
        repeat = 50 if make is all_reduce and value < 20 else 8
        times: dict[str, list[float]] = {backend: [] for backend in steps}
        for _ in range(ROUNDS):
            for backend, step in steps.items():
                times[backend].append(measure(step, repeat))
        if dist.get_rank() == 0:
            ratios = [a / b for a, b in zip(times["local"], times["gloo"], strict=True)]
            words = [
                f"{key} {statistics.median(each) * 1e3:7.2f} ms" for key, each in times.items()
            ]
            spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
            ratio = f"local/gloo {statistics.median(ratios):.2f} ({spread})"
            print(f"{name:22}", *words, ratio, sep="  ", flush=True)
    dist.destroy_process_group()


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    print(json.dumps({"ranks": ranks, "cores": os.cpu_count(), "torch": torch.__version__}))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launch, f"--nproc_per_node={ranks}", __file__]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


if __name__ == "__main__":
    rank() if "RANK" in os.environ else main()
