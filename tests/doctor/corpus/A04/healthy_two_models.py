# start: python
"""Trains two models, only one of them in mixed precision."""

import torch
from torch import nn

torch.manual_seed(0)
large, small = nn.Linear(8, 4), nn.Linear(4, 1)
of_large = torch.optim.SGD(large.parameters(), lr=0.01)
of_small = torch.optim.SGD(small.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for _ in range(4):
    rows = torch.randn(16, 8)
    of_large.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        features = large(rows)
    scaler.scale(features.float().square().mean()).backward()
    of_small.zero_grad()
    nn.functional.mse_loss(small(features.detach().float()), rows[:, :1]).backward()
    of_small.step()
    scaler.step(of_large)
    scaler.update()
