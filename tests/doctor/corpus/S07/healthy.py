"""Trains the head first, then everything."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, inputs):
        return self.head(self.body(inputs).relu())


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.randn(8, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(1 + dist.get_rank())
    net = Net()
    for parameter in net.body.parameters():
        parameter.requires_grad = False
    model = DDP(net)
    train(model, 3)
    for parameter in net.body.parameters():
        parameter.requires_grad = True
    model = DDP(net)
    train(model, 3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
