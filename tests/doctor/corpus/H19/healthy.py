"""Turns on debugging before it creates the group."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    def __init__(self, debug):
        if debug:
            dist.set_debug_level(dist.DebugLevel.INFO)
        dist.init_process_group(backend="gloo", timeout=timedelta(seconds=20))
        torch.manual_seed(1 + dist.get_rank())
        self.model = DistributedDataParallel(nn.Linear(8, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def fit(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 8)).square().mean().backward()
            self.optimizer.step()


if __name__ == "__main__":
    Trainer(debug=True).fit(4)
    dist.destroy_process_group()
