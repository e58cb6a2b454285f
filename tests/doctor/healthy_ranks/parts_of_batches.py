"""All ranks load the same batches and take their parts of each one. They inspect the first batch
before the first epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
whole = DataLoader(TensorDataset(rows), batch_size=16, shuffle=True)
own = DistributedSampler(TensorDataset(rows))
parts = DataLoader(TensorDataset(rows), batch_size=8, sampler=own)
next(iter(parts))


def step(part):
    optimizer.zero_grad()
    model(part).square().mean().backward()
    optimizer.step()


for epoch in range(2):
    own.set_epoch(epoch)
    for (batch,) in whole:
        step(batch.chunk(world)[rank])
    for (part,) in parts:
        step(part)
dist.destroy_process_group()
