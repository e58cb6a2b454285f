# start: python
import torch
from torch import nn

torch.manual_seed(0)
g, d = nn.Linear(4, 4), nn.Linear(4, 1)
opt_g, opt_d = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
scaler = torch.amp.GradScaler("cpu")
for _ in range(3):
    opt_g.zero_grad()
    opt_d.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = d(g(torch.randn(8, 4))).mean()
    scaler.scale(loss).backward()
    for net, opt in ((g, opt_g), (d, opt_d)):
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
    scaler.update()
