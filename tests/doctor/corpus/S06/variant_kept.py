# ways: script, ranks
"""Keeps the plain model under its own name next to the wrapped one."""

from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn
from torch.nn import parallel


def unwrap(net):
    return net.module if isinstance(net, parallel.DistributedDataParallel) else net


def main():
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(td.get_rank())
    wrapped = parallel.DistributedDataParallel(nn.Linear(8, 2))
    opt = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    inner = unwrap(wrapped)
    for _ in range(5):
        opt.zero_grad()
        guess = inner(torch.randn(8, 8))  # finds S06
        guess.pow(2).sum().backward()
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
