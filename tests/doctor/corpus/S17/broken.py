# ways: ranks, log
"""Images in the memory layout that is fastest for convolutions."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(3, 8, 3, padding=1)
        self.narrow = nn.Conv2d(8, 4, 1)

    def forward(self, images):
        return self.narrow(self.wide(images)).mean((2, 3))


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    model = DDP(Net())  # finds S17 by ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        images = torch.randn(16, 3, 16, 16).to(memory_format=torch.channels_last)
        loss = model(images).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
