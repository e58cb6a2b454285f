"""The baseline for paralab's overhead: a hand-written training loop without events, loss weights,
or hooks.

    python bench/handwritten.py WORKLOAD BATCH STEPS PRECISION                                     one device
    torchrun --nproc_per_node=2 bench/handwritten.py WORKLOAD BATCH STEPS PRECISION                DDP

Rank 0 prints the seconds per step as JSON. On a GPU, the script times blocks of steps, with one
synchronization at the end of each block.
"""

import json
import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paralab.workload.load import load_workload

BLOCK = 5  # steps between two synchronizations on a GPU


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
    optimizer = workload.optimizer(model.parameters())
    inputs, targets = workload.data
    seconds = []
    for step in range(steps):
        rows = torch.arange(
            step * batch + rank * (batch // ranks), step * batch + (rank + 1) * (batch // ranks)
        ) % len(inputs)
        x, y = (
            tensor[rows].pin_memory().to(device, non_blocking=True)
            if device == "cuda"
            else tensor[rows]
            for tensor in (inputs, targets)
        )
        start = time.perf_counter() if device == "cpu" or step % BLOCK == 0 else start  # noqa: F821
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else nullcontext():
            loss = workload.loss(model(x), y)
        loss.backward()
        optimizer.step()
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
