# ways: script, ranks
# start: python
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def fit(net, opt, batches, every, epochs):
    for _ in range(epochs):
        seen = 0
        for x, y in batches:
            loss = nn.functional.mse_loss(net(x), y) / every
            loss.backward()
            seen += 1
            if seen == every:
                opt.step()  # finds G06
                opt.zero_grad()
                seen = 0


torch.manual_seed(0)
data = TensorDataset(torch.randn(20, 3), torch.randn(20, 1))
net = nn.Linear(3, 1)
fit(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data, batch_size=4, shuffle=True), every=3, epochs=2)
