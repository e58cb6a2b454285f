# start: python
import torch
from torch import nn

torch.manual_seed(0)
model, probe = nn.Linear(8, 4), nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
probe_optimizer = torch.optim.SGD(probe.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu")
for _ in range(3):
    x = torch.randn(4, 8)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        hidden = model(x)
        loss = hidden.float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    # the probe is small and trains in full precision
    probe_optimizer.zero_grad()
    probe(hidden.detach().float()).square().mean().backward()
    probe_optimizer.step()
