# ways: ranks
"""Sends all gradients in one flat tensor."""

import os
from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn


class Averaged:
    def __init__(self, net):
        self.net = net

    def reduce(self):
        flat = torch.cat([p.grad.flatten() for p in self.net.parameters()])
        td.all_reduce(flat, op=td.ReduceOp.SUM)
        flat /= td.get_world_size()
        start = 0
        for p in self.net.parameters():
            p.grad.copy_(flat[start : start + p.numel()].view_as(p))
            start += p.numel()


def main():
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(int(os.environ["RANK"]) * 31)
    net = nn.Linear(8, 4)
    averaged = Averaged(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        opt.zero_grad()
        net(torch.randn(8, 8)).square().mean().backward()
        averaged.reduce()
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
