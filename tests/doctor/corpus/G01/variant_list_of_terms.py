# ways: ranks
# start: python
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 6), torch.randn(32, 2), torch.randint(0, 3, (32,)))
loader = DataLoader(data, batch_size=4, shuffle=True)
body, where, what = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 3)
model = nn.ModuleList([body, where, what])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
EVERY = 4
for i, (x, box, label) in enumerate(loader):
    hidden = torch.relu(body(x))
    losses = []
    losses.append(nn.functional.smooth_l1_loss(where(hidden), box))
    losses.append(nn.functional.cross_entropy(what(hidden), label))
    sum(losses).backward()  # finds G01
    if (i + 1) % EVERY == 0:
        optimizer.step()
        optimizer.zero_grad()
