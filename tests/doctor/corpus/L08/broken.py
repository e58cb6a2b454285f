# ways: script, ranks, log
"""A few steps on every rank."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(1 + dist.get_rank())
    model = nn.Linear(8, 4)
    model = DDP(model, device_ids=[local_rank])  # finds L08
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = model(torch.randn(8, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"local rank {local_rank}: finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
