# ways: script
# start: never
import torch
from torch import nn


class Moving(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.lin = nn.Linear(width, width)

    def track(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)  # finds D04

    def forward(self, x):
        with torch.no_grad():
            self.track(x)
        return self.lin(x - self.mean)


def wrap(net):
    return torch.nn.DataParallel(net, device_ids=[0, 1])


net = wrap(Moving(4).cuda())
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    opt.zero_grad()
    net(torch.randn(8, 4).cuda()).square().mean().backward()
    opt.step()
