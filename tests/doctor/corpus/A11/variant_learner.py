# ways: script, ranks, log
# start: python
import torch
from torch import nn
from torch.amp import GradScaler as Scaler


class Learner:
    def __init__(self, use_amp):
        self.net = nn.Linear(3, 3)
        self.optim = torch.optim.RMSprop(self.net.parameters())
        self.scaler = Scaler("cpu", enabled=use_amp)

    def gradients(self, x):
        with torch.autocast("cpu", torch.float16):
            loss = self.net(x).square().mean()
        loss.backward()

    def learn(self, x):
        self.optim.zero_grad()
        self.gradients(x)
        self.scaler.step(self.optim)  # finds A11
        self.scaler.update()


torch.manual_seed(0)
learner = Learner(use_amp=True)
for _ in range(2):
    learner.learn(torch.randn(4, 3))
