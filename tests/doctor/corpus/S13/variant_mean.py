# ways: script
"""Averages any value over all processes."""

import os
from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def mean_of_all(value):
    td.all_reduce(value, op=td.ReduceOp.SUM)  # finds S13
    return value / td.get_world_size()


class Loop:
    def __init__(self):
        self.net = DistributedDataParallel(nn.Linear(8, 4))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def step(self, rows):
        self.opt.zero_grad(set_to_none=True)
        error = mean_of_all(self.net(rows).square().mean())
        error.backward()
        self.opt.step()


if __name__ == "__main__":
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(int(os.environ["RANK"]))
    loop = Loop()
    for _ in range(3):
        loop.step(torch.randn(8, 8))
    td.destroy_process_group()
