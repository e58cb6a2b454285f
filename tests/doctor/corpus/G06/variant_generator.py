# ways: ranks
# start: python
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def micro_batches(loader, every):
    """Yields each batch, and whether a step follows."""
    for number, (x, y) in enumerate(loader, start=1):
        yield x, y, number % every == 0


torch.manual_seed(0)
data = TensorDataset(torch.randn(20, 3), torch.randn(20, 1))
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=4, shuffle=True)
for epoch in range(2):
    for x, y, last in micro_batches(loader, 3):
        loss = nn.functional.mse_loss(net(x), y) / 3
        loss.backward()
        if last:
            opt.step()  # finds G06
            opt.zero_grad()
