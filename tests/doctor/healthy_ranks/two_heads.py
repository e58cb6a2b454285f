"""Adds two losses from one forward pass, and occasionally prints the mean."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, rows):
        features = self.body(rows)
        return [head(features) for head in self.heads]


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
criterion = nn.L1Loss()
for step in range(6):
    rows = torch.randn(20, 4)
    first, second = model(rows)
    loss = criterion(first, rows[:, :1]) + 0.5 * criterion(second, rows[:, 1:2])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        shown /= dist.get_world_size()
        print(shown.item())
dist.destroy_process_group()
