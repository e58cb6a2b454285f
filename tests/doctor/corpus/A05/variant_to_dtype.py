# ways: script, ranks, log
# start: python
import torch
from torch import nn
from torch.amp import GradScaler, autocast


def build(dtype):
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    return net.to(device="cpu", dtype=dtype)  # finds A05 by script


class Fit:
    def __init__(self, precision):
        self.precision = precision
        self.net = build(precision)
        self.opt = torch.optim.AdamW(self.net.parameters())
        self.scaler = GradScaler("cpu")

    def __call__(self, x):
        with autocast("cpu", dtype=self.precision):
            loss = self.net(x).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()


torch.manual_seed(0)
fit = Fit(torch.float16)
for _ in range(2):
    fit(torch.randn(4, 4))
