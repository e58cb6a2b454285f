"""The training loop, as one class."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Engine:
    def __init__(self, options):
        self.options = options
        self.rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        torch.manual_seed(11 + self.rank)
        rows = torch.linspace(0, 1, 96).reshape(32, 3)
        self.data = TensorDataset(rows, rows.sum(1, keepdim=True))
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, batch_size=4, sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=options.lr)

    @property
    def reports(self):
        return self.rank == 0

    def run(self):
        try:
            for epoch in range(self.options.epochs):
                self.sampler.set_epoch(epoch)
                self.epoch(epoch)
        finally:
            dist.destroy_process_group()

    def epoch(self, number):
        counted = torch.zeros(1)
        for rows, wanted in self.loader:
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(rows), wanted).backward()
            self.optimizer.step()
            counted += len(rows)
        if self.reports:
            with torch.no_grad():
                dist.reduce(counted, dst=0)  # finds H03 rank 0
                print(f"epoch {number}: {int(counted)} rows")
