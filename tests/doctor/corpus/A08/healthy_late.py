# start: python
"""The weight of one term grows in every step."""

import torch
from torch import nn


class Training:
    def __init__(self):
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.sgd = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def loss(self, rows, step):
        with torch.autocast("cpu", dtype=torch.float16):
            given = self.net(rows).float()
        return given.square().mean() + (given[:1] * 0 + 300 - step).sqrt().mean()

    def run(self, steps):
        for step in range(steps):
            self.sgd.zero_grad()
            self.scaler.scale(self.loss(torch.randn(8, 4), step)).backward()
            self.scaler.step(self.sgd)
            self.scaler.update()


if __name__ == "__main__":
    Training().run(260)
