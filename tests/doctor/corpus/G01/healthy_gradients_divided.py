"""Sums gradients over micro-batches and divides the sum before the step."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 4


def apply(model, optimizer, count):
    for parameter in model.parameters():
        parameter.grad.div_(count)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(7)
    dataset = TensorDataset(torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (inputs, targets) in enumerate(loader):
            boundary = (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader)
            with contextlib.nullcontext() if boundary else model.no_sync():
                nn.functional.mse_loss(model(inputs), targets).backward()
            if boundary:
                apply(model, optimizer, ACCUMULATE)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
