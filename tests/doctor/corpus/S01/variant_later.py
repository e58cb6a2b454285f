# ways: ranks
"""A second head contributes to the loss only in the first steps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)
        self.helper = nn.Linear(8, 2)

    def forward(self, rows, warm):
        code = torch.tanh(self.body(rows))
        return self.head(code) + self.helper(code) if warm else self.head(code)


def fit():
    net = DistributedDataParallel(TwoHeads())  # finds S01
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(9):
        optimizer.zero_grad()
        net(torch.randn(8, 8), warm=number < 5).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    fit()
    dist.destroy_process_group()
