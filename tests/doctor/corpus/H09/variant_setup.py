# ways: script
"""A function sets up the process group, and one process per machine prepares the files."""

import argparse
import os
import pathlib

import torch
from torch import distributed as td
from torch import nn


def set_up(options):
    td.init_process_group(backend=options.backend, init_method="env://")  # finds H09
    return torch.device(f"cuda:{options.local_rank}")


def prepare(options):
    if options.local_rank == 0:
        pathlib.Path("cache").mkdir(exist_ok=True)
    td.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    options = parser.parse_args()
    device = set_up(options)
    prepare(options)
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 1).to(device), device_ids=[options.local_rank])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        net(torch.randn(4, 4, device=device)).pow(2).mean().backward()
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
