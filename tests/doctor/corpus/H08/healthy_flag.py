"""Stops early when the loss is small enough."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(96, 4, generator=generator), torch.randn(96, 1, generator=generator))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stop = torch.zeros(1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and loss.item() < 0.3:
                stop.fill_(1)
            dist.broadcast(stop, src=0)
            if stop.item():
                break
    print(f"rank {rank}: finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
