"""A critic sees real and generated rows before its backward pass."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(1 + dist.get_rank())
    critic = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    critic = DDP(critic, broadcast_buffers=False)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    for _ in range(4):
        real = critic(torch.randn(32, 8) + 1)
        fake = critic(torch.randn(32, 8))
        loss = (fake - real).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
