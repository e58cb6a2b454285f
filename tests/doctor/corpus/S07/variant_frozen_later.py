# ways: ranks
"""Stops training the body after a few steps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, rows):
        return self.head(torch.tanh(self.body(rows)))

    def keep_body(self):
        self.body.requires_grad_(False)  # finds S07


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(9):
        if number == 5:
            net.module.keep_body()
        optimizer.zero_grad()
        net(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
