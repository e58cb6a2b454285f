# ways: script
# start: never
import torch
import torch.nn.functional as F
from torch.nn import DataParallel as DP
from torch.nn import Linear, Module


class Net(Module):
    def __init__(self):
        super().__init__()
        self.a = Linear(4, 4)

    def forward(self, batch):
        out = self.a(batch["x"])
        loss = F.mse_loss(out, batch["y"])
        return out, loss


class Runner:
    def __init__(self, gpus):
        self.net = DP(Net().to("cuda:0"), gpus)
        self.opt = torch.optim.Adam(self.net.parameters())

    def step(self, batch):
        out, loss = self.net(batch)
        self.opt.zero_grad()
        loss.backward()  # finds D01
        self.opt.step()
        return out


runner = Runner([0, 1, 2, 3])
for _ in range(3):
    runner.step({"x": torch.randn(8, 4).cuda(), "y": torch.randn(8, 4).cuda()})
