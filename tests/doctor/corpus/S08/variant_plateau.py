# ways: ranks
"""The learning rate falls when the loss stops falling."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

NOISE = [0.0, 5.0]


class Training:
    def __init__(self, rank):
        self.net = DDP(nn.Linear(8, 1))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.rate = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.5, patience=0)
        self.noise = NOISE[rank]

    def epoch(self, number):
        rows = torch.randn(16, 8)
        loss = nn.functional.mse_loss(self.net(rows), rows[:, :1])
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.rate.step(loss.item() + number * self.noise)  # finds S08


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(dist.get_rank())
    training = Training(dist.get_rank())
    for number in range(4):
        training.epoch(number)
    dist.destroy_process_group()
