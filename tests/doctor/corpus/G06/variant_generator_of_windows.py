# ways: script
# start: python
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def windows(loader, every):
    group = []
    for batch in loader:
        group.append(batch)
        if len(group) == every:  # finds G06
            yield group
            group = []


torch.manual_seed(0)
data = TensorDataset(torch.randn(20, 3), torch.randn(20, 1))
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=4, shuffle=True)
for epoch in range(2):
    for group in windows(loader, 3):
        for x, y in group:
            loss = nn.functional.mse_loss(net(x), y) / len(group)
            loss.backward()
        opt.step()
        opt.zero_grad()
