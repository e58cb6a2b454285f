"""The learning rate grows with the number of ranks."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BASE = 0.01


def make_optimizer(model, rate):
    return torch.optim.SGD(model.parameters(), lr=rate)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(1 + dist.get_rank())
    rate = BASE * dist.get_world_size()
    model = DDP(nn.Linear(8, 4))
    optimizer = make_optimizer(model, rate)
    for _ in range(4):
        loss = model(torch.randn(8, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
