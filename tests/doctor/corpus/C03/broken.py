# ways: script, ranks
"""Saves the weights after training."""

import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FILE = os.path.join(tempfile.gettempdir(), f"weights-{os.environ['MASTER_PORT']}.pt")


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    model = DDP(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = model(torch.randn(8, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.module.state_dict(), FILE)  # finds C03
    dist.barrier()
    print(f"rank {rank}: saved")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
