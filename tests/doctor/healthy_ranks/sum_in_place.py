"""A helper sums over the ranks in place, and its callers divide."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def together(value):
    dist.all_reduce(value)


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(count):
    for _ in range(count):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        together(shown)
        print(shown.item() / dist.get_world_size())


train(4)
dist.destroy_process_group()
