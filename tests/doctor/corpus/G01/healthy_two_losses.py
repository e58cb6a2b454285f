# start: python
import torch
from torch import nn

torch.manual_seed(0)
encoder, a, b = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 2)
optimizer = torch.optim.Adam([*encoder.parameters(), *a.parameters(), *b.parameters()])
for step in range(4):
    x, y, c = torch.randn(8, 4), torch.randn(8, 1), torch.randint(0, 2, (8,))
    optimizer.zero_grad()
    hidden = encoder(x)
    # two tasks share one update: their gradients are meant to add up
    nn.functional.mse_loss(a(hidden), y).backward(retain_graph=True)
    nn.functional.cross_entropy(b(hidden), c).backward()
    optimizer.step()
