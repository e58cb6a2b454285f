"""A stage runs forward and backward for one micro-batch at a time, and synchronizes once per
step."""

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
        for number, part in enumerate(parts):
            with model.no_sync() if number < MICRO - 1 else nullcontext():
                (model(part).square().mean() / MICRO).backward()
        optimizer.step()
    print(f"rank {rank}: finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
