# ways: script, ranks
"""Early stopping with patience, in a separate class."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Patience:
    def __init__(self, most):
        self.best = float("inf")
        self.left = self.most = most

    def exhausted(self, value):
        if value < self.best:
            self.best, self.left = value, self.most
        else:
            self.left -= 1
        return self.left <= 0


def run_epoch(net, batches, opt):
    total = 0.0
    for rows, wanted in batches:
        opt.zero_grad()
        error = nn.functional.l1_loss(net(rows), wanted)
        error.backward()
        opt.step()
        total += error.item()
    return total / len(batches)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(int(os.environ["RANK"]))
    generator = torch.Generator().manual_seed(1)
    pairs = TensorDataset(torch.randn(32, 3, generator=generator), torch.randn(32, 1, generator=generator))
    order = DistributedSampler(pairs)
    batches = DataLoader(pairs, batch_size=4, sampler=order)
    net = DistributedDataParallel(nn.Linear(3, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    patience = Patience(1)
    for epoch in range(30):
        order.set_epoch(epoch)
        error = run_epoch(net, batches, opt)
        if patience.exhausted(error):
            break  # finds H08
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
