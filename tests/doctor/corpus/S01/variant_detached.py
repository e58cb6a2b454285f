# ways: ranks, log
"""Takes features from a body that is not trained."""

from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn
from torch.nn import parallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, rows):
        with torch.no_grad():
            features = self.body(rows)
        return self.head(features)


def main():
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(td.get_rank())
    net = parallel.DistributedDataParallel(Net())  # finds S01 by ranks
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        net(torch.randn(8, 8)).square().mean().backward()
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
