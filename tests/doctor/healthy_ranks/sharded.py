"""Parameters, gradients, and optimizer state are sharded over the processes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for part in (model[0], model[2], model):
    fully_shard(part, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    rows = torch.randn(8, 8)
    nn.functional.mse_loss(model(rows), rows[:, :1]).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
