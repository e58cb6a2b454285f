# ways: script
"""Only the first process cleans up."""

import os
from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Job:
    def __init__(self):
        td.init_process_group(backend="gloo", timeout=timedelta(seconds=20))
        self.first = os.environ["RANK"] == "0"
        torch.manual_seed(int(os.environ["RANK"]))
        self.net = DistributedDataParallel(nn.Linear(8, 4))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def work(self):
        for _ in range(3):
            self.opt.zero_grad()
            self.net(torch.randn(8, 8)).square().mean().backward()
            self.opt.step()

    def end(self):
        if self.first:
            print("finished")
            td.destroy_process_group()  # finds H17


if __name__ == "__main__":
    job = Job()
    try:
        job.work()
    finally:
        job.end()
