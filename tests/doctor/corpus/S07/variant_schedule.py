# ways: ranks
"""A schedule unfreezes the encoder at a given epoch."""

import os
from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.decoder = nn.Linear(8, 8)
        self.encoder.requires_grad_(False)

    def forward(self, rows):
        return self.decoder(self.encoder(rows))

    def thaw(self):
        self.encoder.requires_grad_(True)  # finds S07


def main():
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(int(os.environ["RANK"]))
    net = DistributedDataParallel(Task())
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(4):
        if epoch == 2:
            net.module.thaw()
        for _ in range(2):
            rows = torch.randn(8, 8)
            opt.zero_grad()
            (net(rows) - rows).square().mean().backward()
            opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
