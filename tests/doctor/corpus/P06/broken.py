# ways: script, ranks
"""A stage runs all forward passes, then all backward passes, and synchronizes once per step."""

from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO = 4


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        parts = torch.randn(16, 8).chunk(MICRO)
        optimizer.zero_grad()
        outputs = []
        for number, part in enumerate(parts):
            with model.no_sync() if number < MICRO - 1 else nullcontext():
                outputs.append(model(part))
        for number, output in enumerate(outputs):
            with model.no_sync() if number < MICRO - 1 else nullcontext():
                (output.square().mean() / MICRO).backward()  # finds P06
        optimizer.step()
    print(f"rank {rank}: finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
