# ways: ranks
"""Data parallelism by hand: gradients are averaged after backward."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model, world):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        loss = model(torch.randn(8, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, world)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
