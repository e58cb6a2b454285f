# ways: ranks
# start: python
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Window:
    def __init__(self, size):
        self.size = size
        self.seen = 0

    def is_full(self):
        self.seen += 1
        if self.seen == self.size:
            self.seen = 0
            return True
        return False


def fit(net, opt, batches, window):
    for epoch in range(2):
        for x, y in batches:
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()  # finds G01
            if window.is_full():
                opt.step()
                opt.zero_grad()


torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
net = nn.Linear(3, 1)
fit(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data, batch_size=4, shuffle=True), Window(3))
