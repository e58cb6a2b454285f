# ways: script, ranks, log
"""A function prepares the model and creates its optimizer."""

import argparse
import os
from datetime import timedelta

import torch
from torch import distributed as td
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, rows):
        return self.layer(rows)


def prepare(options, net):
    net = nn.parallel.DistributedDataParallel(net, device_ids=[options.local_rank], output_device=options.local_rank)  # finds L08
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    options = parser.parse_args()
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(td.get_rank())
    net, opt = prepare(options, Net())
    for _ in range(3):
        opt.zero_grad()
        net(torch.randn(8, 8)).square().mean().backward()
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
