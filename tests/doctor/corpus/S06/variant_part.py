# ways: ranks
"""Trains the encoder of a network together with a head for another task."""

import os
from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.decoder = nn.Linear(8, 8)

    def forward(self, rows):
        return self.decoder(self.encoder(rows))


def learn(net, opt, rows):
    opt.zero_grad()
    code = net.module.encoder(rows)
    guess = net.module.decoder(code)
    nn.functional.mse_loss(guess, rows).backward()  # finds S06
    opt.step()


if __name__ == "__main__":
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(int(os.environ["RANK"]) + 20)
    net = DistributedDataParallel(Net())
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        learn(net, opt, torch.randn(8, 8))
    td.destroy_process_group()
