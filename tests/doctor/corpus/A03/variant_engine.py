# ways: script, log
# start: python
import torch
from torch import nn, optim
from torch.amp import GradScaler


class Engine:
    def __init__(self, net):
        self.net = net
        self.opt = optim.SGD(net.parameters(), lr=0.1)
        self.scaler = GradScaler("cpu")

    def apply(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.opt)  # finds A03
        self.opt.zero_grad()

    def loop(self, n):
        for _ in range(n):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = self.net(torch.randn(4, 4)).square().mean()
            self.apply(loss)


torch.manual_seed(0)
Engine(nn.Linear(4, 4)).loop(3)
