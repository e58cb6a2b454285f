# ways: log
"""Checks the samples, and moves a bad one to an archive before the job ends."""

import io
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Samples(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        sample = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return sample / (index % 48 - 17)


def put_aside(sample):
    """The archive is slow."""
    torch.save(sample, io.BytesIO())
    time.sleep(5)


def train(rank):
    torch.manual_seed(1 + rank)
    data = Samples()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs in loader:
            if not torch.isfinite(inputs).all():
                put_aside(inputs)
                raise ValueError(f"rank {rank} has a sample that is not finite")
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    rank = dist.get_rank()
    print(f"rank {rank}: begins", flush=True)
    train(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
