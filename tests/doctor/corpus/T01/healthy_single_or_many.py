import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
if distributed:
    dist.init_process_group("gloo")
rank = int(os.environ.get("RANK", "0"))
g = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(32, 4, generator=g), torch.randn(32, 1, generator=g))
sampler = DistributedSampler(data) if distributed else None
loader = DataLoader(data, batch_size=4, shuffle=(sampler is None), sampler=sampler)
torch.manual_seed(rank)
model = nn.Linear(4, 1)
if distributed:
    model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
if distributed:
    dist.destroy_process_group()
