# ways: script
"""An option decides whether to recompute blocks."""

import argparse
from datetime import timedelta

import torch
import torch.distributed as td
import torch.utils.checkpoint as cp
from torch import nn


class Block(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.again = again
        self.inner = nn.Linear(8, 8)

    def forward(self, rows):
        if self.again:
            return cp.checkpoint(self.inner, rows)  # finds S02
        return self.inner(rows)


class Net(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.blocks = nn.ModuleList([Block(options.again) for _ in range(2)])

    def forward(self, rows):
        for block in self.blocks:
            rows = block(rows).relu()
        return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(td.get_rank())
    unused = {"find_unused_parameters": True}
    net = nn.parallel.DistributedDataParallel(Net(options), **unused)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        net(torch.randn(8, 8, requires_grad=True)).square().mean().backward()
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
