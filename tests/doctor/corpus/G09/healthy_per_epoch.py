# start: python
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

torch.manual_seed(0)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = CosineAnnealingLR(opt, T_max=3)
batches = [torch.randn(2, 4) for _ in range(4)]
for epoch in range(3):
    for i, x in enumerate(batches):
        loss = net(x).square().mean() / 2
        loss.backward()
        if (i + 1) % 2 == 0:
            opt.step()
            opt.zero_grad()
    scheduler.step()
