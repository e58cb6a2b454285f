"""Every process tries a different learning rate from the same initial weights and data; they agree
on the best one."""

import torch
import torch.distributed as dist
from torch import nn

RATES = [0.1, 0.01]

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=RATES[dist.get_rank()])
for _ in range(4):
    loss = model(torch.randn(4, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
best = loss.detach().clone()
dist.all_reduce(best, op=dist.ReduceOp.MIN)
print(best.item())
dist.destroy_process_group()
