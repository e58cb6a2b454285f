"""The baseline for paralab's overhead: a hand-written training loop without events, loss weights,
or hooks.

    python bench/handwritten.py WORKLOAD BATCH STEPS PRECISION                                     one device
    torchrun --nproc_per_node=2 bench/handwritten.py WORKLOAD BATCH STEPS PRECISION                DDP

Rank 0 prints the seconds per step as JSON. On a GPU, the script times blocks of steps, with one
synchronization at the end of each block.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paralab.workload.load import load_workload
from paralab.workload.workload import Workload

BLOCK = 5  # steps between two synchronizations on a GPU


class Loop(NamedTuple):
    """What a training step calls. A framework replaces these parts with its own."""

    model: Any
    optimizer: Any
    autocast: Callable[[], AbstractContextManager[Any]]
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward


def write_by_hand(model: Any, workload: Workload, device: str, precision: str) -> Loop:
    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext()

    return Loop(model, workload.optimizer(model.parameters()), autocast)


def load_batches(
    workload: Workload, batch: int, steps: int, device: str, rank: int = 0, ranks: int = 1
) -> Iterator[list[torch.Tensor]]:
    """Yield each step's inputs and targets on the device, in order."""
    size = batch // ranks
    for step in range(steps):
        first = step * batch + rank * size
        rows = torch.arange(first, first + size) % len(workload.data[0])
        batch_ = [tensor[rows] for tensor in workload.data]
        if device == "cuda":
            batch_ = [tensor.pin_memory().to(device, non_blocking=True) for tensor in batch_]
        yield batch_


def train_step(loop: Loop, workload: Workload, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loop.optimizer.zero_grad(set_to_none=True)
    with loop.autocast():
        loss = workload.loss(loop.model(x), y)
    loop.backward(loss)
    loop.optimizer.step()
    return loss


def main() -> None:
    name, batch, steps, precision = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    workload = load_workload(name)
    torch.manual_seed(0)
    model = workload.model().to(device)
    if ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    loop = write_by_hand(model, workload, device, precision)
    seconds = []
    for step, (x, y) in enumerate(load_batches(workload, batch, steps, device, rank, ranks)):
        if device == "cpu" or step % BLOCK == 0:
            start = time.perf_counter()
        train_step(loop, workload, x, y)
        if device == "cpu":
            seconds.append(time.perf_counter() - start)
        elif step % BLOCK == BLOCK - 1:
            torch.cuda.synchronize()
            seconds += [(time.perf_counter() - start) / BLOCK] * BLOCK
    if ranks > 1:  # a step ends when its slowest rank finishes, as in paralab's numbers
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds = slowest.tolist()
    if rank == 0:
        print(json.dumps(seconds))
    if ranks > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
