# ways: script
# start: python
"""The number of ranks is a constant at the top of the file, passed to the ranks as an argument."""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as td
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 4


def join(rank, ranks, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    td.init_process_group(backend="gloo", world_size=ranks, rank=rank, timeout=timedelta(seconds=2))  # finds H18


def train(rank, ranks, port):
    join(rank, ranks, port)
    torch.manual_seed(rank)
    net = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()
    td.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=29584)
    options = parser.parse_args()
    mp.spawn(train, args=(RANKS, options.port), nprocs=RANKS - 1, join=True)


if __name__ == "__main__":
    main()
