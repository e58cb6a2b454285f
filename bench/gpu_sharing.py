"""Measure ranks that share one GPU: DDP steps of gpt:124m (bf16, global batch 16) over the backend
`local`, over gloo, and without communication, with and without MPS.

    python bench/gpu_sharing.py [--fast]

All cases of a launch take turns, so noise affects them equally. If a case has fewer ranks than the
launch, it uses the first ranks, and the others sleep. Each time is the median over the rounds. Each
ratio compares with one rank that processes the entire batch in the same launch.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paralab.collectives  # noqa: F401
from paralab.machine.mps import mps_daemon
from paralab.workload.load import load_workload

ROOT = Path(__file__).parent.parent
RANKS = (2, 4)
BATCH = 16  # samples per step over all ranks
STEPS = 10  # steps per measurement
WHOLE_MB = 2000  # one bucket
BUCKETS_MB = (25, WHOLE_MB)


def make_step(group: dist.ProcessGroup | None, ranks: int, bucket: int) -> Callable[[], None]:
    """Return a training step. Without a group, the step does not communicate."""
    torch.manual_seed(0)
    workload = load_workload("gpt:124m")
    plain = workload.model().cuda()
    model = (
        DistributedDataParallel(plain, process_group=group, bucket_cap_mb=bucket)
        if group
        else plain
    )
    assert workload.optimizer
    optimizer = workload.optimizer(plain.parameters())
    first = dist.get_rank() * (BATCH // ranks)
    x, y = (tensor[first : first + BATCH // ranks].cuda() for tensor in workload.data)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = workload.loss(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def measure(step: Callable[[], None], group: dist.ProcessGroup) -> float:
    """Return the seconds per step."""
    step()
    torch.cuda.synchronize()
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / STEPS


def rank() -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rounds, fast = int(os.environ["ROUNDS"]), bool(os.environ.get("FAST"))
    cases: dict[str, tuple[Callable[[], None] | None, dist.ProcessGroup, int]] = {}

    def add(name: str, ranks: int, backend: str | None, bucket: int = 25) -> None:
        members = list(range(ranks))
        meet = dist.new_group(members, backend="gloo")
        group = dist.new_group(members, backend=backend) if backend else None
        step = make_step(group, ranks, bucket) if dist.get_rank() < ranks else None
        cases[name] = step, meet, ranks

    add("1 rank", 1, None)
    for ranks in RANKS:
        add(f"{ranks} ranks, no communication", ranks, None)
        for bucket in BUCKETS_MB:
            what = "one bucket" if bucket == WHOLE_MB else f"{bucket} MB buckets"
            add(f"{ranks} ranks, local, {what}", ranks, "local", bucket)
        if ranks == 2 and not fast:
            add("2 ranks, gloo, 25 MB buckets", ranks, "gloo", 25)

    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, (step, meet, _) in cases.items():
            dist.barrier()
            if step:
                seconds = measure(step, meet)
                times[name] += [seconds] if number else []  # the first round is a warm-up
    if dist.get_rank() == 0:
        for name, each in times.items():
            ratios = [a / b for a, b in zip(each, times["1 rank"], strict=True)]
            spread = f"({min(ratios):.2f}–{max(ratios):.2f})"
            milliseconds = statistics.median(each) * 1e3
            print(
                f"{name:34} {milliseconds:7.1f} ms  {statistics.median(ratios):.2f} {spread}",
                flush=True,
            )
    os._exit(0)


def main() -> None:
    fast = "--fast" in sys.argv
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launch, f"--nproc_per_node={max(RANKS)}", __file__]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    environment |= {"ROUNDS": "4" if fast else "7"} | ({"FAST": "1"} if fast else {})
    print("Without MPS", flush=True)
    subprocess.run(command, env=environment, check=True)
    with mps_daemon() as variables:
        print("With MPS", flush=True)
        subprocess.run(command, env=environment | variables, check=True)


if __name__ == "__main__":
    rank() if "RANK" in os.environ else main()
