# ways: script, ranks
"""A decorator marks functions that only the first process runs."""

import functools
import os
from datetime import timedelta

import torch
import torch.distributed as c10d
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def on_first(function):
    @functools.wraps(function)
    def wrapped(*arguments, **named):
        if int(os.environ["RANK"]) == 0:
            return function(*arguments, **named)
        return None

    return wrapped


@on_first
def report(step, value):
    everything = [torch.zeros(()) for _ in range(c10d.get_world_size())]
    c10d.all_gather(everything, value)  # finds H03 rank 0
    print(step, [float(one) for one in everything])


def main():
    c10d.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(5 + c10d.get_rank())
    net = DistributedDataParallel(nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(3):
        loss = net(torch.randn(8, 4)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        report(step, loss.detach())
    c10d.destroy_process_group()


if __name__ == "__main__":
    main()
