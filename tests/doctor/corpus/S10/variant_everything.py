# ways: script, ranks
"""One seed, an option, determines all random numbers."""

import argparse
import random
from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __init__(self):
        self.rows = torch.linspace(0, 1, 96).reshape(32, 3)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        return row + 0.1 * torch.randn(3), row.sum(0, keepdim=True)


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)  # finds S10
    return seed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args()
    seed_everything(options.seed)
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    pairs = Noisy()
    order = DistributedSampler(pairs)
    batches = DataLoader(pairs, batch_size=4, sampler=order)
    net = DistributedDataParallel(nn.Linear(3, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for epoch in range(2):
        order.set_epoch(epoch)
        for rows, wanted in batches:
            opt.zero_grad()
            nn.functional.mse_loss(net(rows), wanted).backward()
            opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
