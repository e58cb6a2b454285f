# start: python
import torch
from torch import nn


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 1)
        self.seen = 0

    def forward(self, x):
        return self.body(x)


def main():
    torch.manual_seed(0)
    model = nn.DataParallel(Counted())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        x = torch.randn(16, 8)
        model.module.seen += x.shape[0]
        model(x).square().mean().backward()
        optimizer.step()
    print("samples", model.module.seen)


if __name__ == "__main__":
    main()
