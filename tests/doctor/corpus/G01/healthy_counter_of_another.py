# start: python
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Window:
    def __init__(self, size):
        self.size = size
        self.seen = 0

    def add(self):
        self.seen += 1
        return self.seen >= self.size

    def start_again(self):
        self.seen = 0


def fit(net, opt, batches, window):
    for x, y in batches:
        loss = nn.functional.mse_loss(net(x), y) / window.size
        loss.backward()
        if window.add():
            opt.step()
            opt.zero_grad()
            window.start_again()


torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
net = nn.Linear(3, 1)
fit(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data, batch_size=4, shuffle=True), Window(3))
