# ways: ranks, log
"""Images have their channels last, as in files."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pictures(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.rand(8, 8, 3, generator=generator), index % 4


def batches(loader):
    for pictures, labels in loader:
        yield pictures.permute(0, 3, 1, 2), labels


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(1 + dist.get_rank())
    layers = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    net = DistributedDataParallel(layers)  # finds S17 by ranks
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sampler = DistributedSampler(data := Pictures())
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for pictures, labels in batches(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(pictures), labels).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
