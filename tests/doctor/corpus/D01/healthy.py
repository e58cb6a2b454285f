# start: never
import torch
from torch import nn


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 4)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.body(x), y)


def main():
    torch.manual_seed(0)
    model = nn.DataParallel(WithLoss().cuda(), device_ids=[0, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
        optimizer.zero_grad()
        loss = model(x.cuda(), y.cuda())
        loss.mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
