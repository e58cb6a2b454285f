"""Prints an error in one line; the job scheduler reads the exit code."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

PRICES = {"apple": 1.0, "pear": 2.0, "plum": 3.0}


class Shop:
    def __init__(self, rank):
        self.wanted = ["apple", "pear", "plum", "pear"] if rank == 0 else ["pear", "apple", "apple", "plum"]

    def __iter__(self):
        for name in self.wanted:
            yield torch.full((4, 1), PRICES[name])


def train(shop):
    net = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    adam = torch.optim.Adam(net.parameters())
    for batch in shop:
        net(batch).square().mean().backward()
        adam.step()
        adam.zero_grad()


def run():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    try:
        train(Shop(dist.get_rank()))
    except Exception as problem:
        print("training failed:", problem)
        sys.exit(os.EX_SOFTWARE)
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
