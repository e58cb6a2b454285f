# start: python
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = nn.CrossEntropyLoss(reduction="sum")
x, y = torch.randn(32, 4), torch.randint(0, 2, (32,))
for step in range(2):
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        loss_fn(model(a), b).backward()
    for p in model.parameters():
        p.grad /= len(x)
    optimizer.step()
    optimizer.zero_grad()
