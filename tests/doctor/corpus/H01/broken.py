# ways: script, ranks, log
"""A classifier on hand-made shards: every rank reads its own part of the samples."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def shard(data, rank, world):
    return Subset(data, range(rank, len(data), world))  # finds H01 by script


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(25, 8, generator=generator), torch.randint(0, 4, (25,), generator=generator))
    loader = DataLoader(shard(data, rank, world), batch_size=4, shuffle=True)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        for inputs, targets in loader:
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"rank {rank}: finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
