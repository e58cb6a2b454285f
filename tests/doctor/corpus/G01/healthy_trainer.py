# start: python
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 12)
        self.head = nn.Linear(12, 1)

    def forward(self, x):
        return self.head(F.relu(self.body(x)))


class Trainer:
    def __init__(self, model, optimizer, cfg):
        self.model, self.optimizer, self.cfg = model, optimizer, cfg
        self.scaler = GradScaler("cpu")
        self.micro = 0

    def loss(self, batch):
        x, y = batch
        with autocast("cpu", dtype=torch.float16):
            return F.mse_loss(self.model(x), y)

    def backward(self, loss):
        self.scaler.scale(loss / self.cfg.grad_accum_steps).backward()

    def maybe_update(self):
        self.micro += 1
        if self.micro % self.cfg.grad_accum_steps == 0:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def train(self, batches):
        for batch in batches:
            self.backward(self.loss(batch))
            self.maybe_update()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--grad-accum-steps", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(1)
    net = Net()
    trainer = Trainer(net, torch.optim.AdamW(net.parameters()), args)
    trainer.train([(torch.randn(4, 6), torch.randn(4, 1)) for _ in range(4)])
