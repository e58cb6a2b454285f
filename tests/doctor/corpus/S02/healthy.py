"""Saves memory by recomputing a block in backward."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.last = nn.Linear(16, 4)
        self.auxiliary = nn.Linear(16, 4)

    def forward(self, inputs, auxiliary):
        hidden = checkpoint(self.block, self.first(inputs), use_reentrant=False)
        return self.auxiliary(hidden) if auxiliary else self.last(hidden)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(1 + dist.get_rank())
    model = DDP(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss = model(torch.randn(8, 8), step % 2 == 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
