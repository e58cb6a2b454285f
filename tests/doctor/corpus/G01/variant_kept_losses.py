# ways: script
# start: python
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
loader = DataLoader(data, batch_size=4, shuffle=True)
net = nn.Linear(6, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
losses = []
for i, (x, y) in enumerate(loader):
    losses.append(nn.functional.mse_loss(net(x), y))
    if (i + 1) % 4 == 0:
        optimizer.zero_grad()
        sum(losses).backward()  # finds G01
        optimizer.step()
        losses = []
