# ways: script
# start: python
import contextlib

import torch
from torch import amp, nn

PRECISION = {"half": torch.float16, "brain": torch.bfloat16}["brain"]


class Step:
    def __init__(self, net, opt):
        self.net, self.opt = net, opt
        self.scale = amp.GradScaler("cpu", enabled=True)  # finds A06

    def precision(self):
        return amp.autocast("cpu", PRECISION) if PRECISION is not None else contextlib.nullcontext()

    def __call__(self, x):
        with self.precision():
            out = self.net(x).float().mean()
        self.scale.scale(out).backward()
        self.scale.step(self.opt)
        self.scale.update()
        self.opt.zero_grad()


torch.manual_seed(0)
net = nn.Linear(4, 4)
step = Step(net, torch.optim.SGD(net.parameters(), lr=0.1))
for _ in range(3):
    step(torch.randn(4, 4))
