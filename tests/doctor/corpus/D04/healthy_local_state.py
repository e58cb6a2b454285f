# start: python
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.calls = 0

    def reset(self):
        self.calls = 0

    def forward(self, x):
        hidden = self.lin(x)
        return hidden + x


net = nn.DataParallel(Net())
net.module.reset()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    opt.zero_grad()
    net(torch.randn(8, 4)).square().mean().backward()
    opt.step()
    net.module.calls += 1
