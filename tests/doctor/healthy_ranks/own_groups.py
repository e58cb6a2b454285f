"""Two groups train two models."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group([0]), dist.new_group([1])]
torch.manual_seed(rank)
model = DDP(nn.Linear(4, 2), process_group=groups[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
