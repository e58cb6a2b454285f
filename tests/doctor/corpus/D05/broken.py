# ways: script, ranks, log
# start: python
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.body(x).relu())


def main():
    torch.manual_seed(0)
    model = nn.DataParallel(Classifier())
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)  # finds D05
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, 8)), torch.randint(0, 3, (8,))).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
