# ways: script, ranks
# start: python
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
xs, ys = torch.randn(32, 4), torch.randint(0, 2, (32,))
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(xs, ys), batch_size=4, shuffle=True)
updates = 0
opt.zero_grad()
for n, batch in enumerate(data, start=1):
    x, y = batch
    out = net(x)
    cost = criterion(out, y)
    cost.backward()  # finds G01
    if n % 4:
        continue
    opt.step()
    opt.zero_grad(set_to_none=True)
    updates += 1
print("updates", updates)
