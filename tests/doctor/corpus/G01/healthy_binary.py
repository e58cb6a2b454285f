"""Four batches make up one step."""

import torch
import torch.distributed as dist
from torch import nn


class Accumulator:
    def __init__(self, net, sgd, every):
        self.net, self.sgd, self.every, self.calls = net, sgd, every, 0

    def __call__(self, loss):
        (loss / self.every).backward()
        self.calls += 1
        if self.calls % self.every == 0:
            self.sgd.step()
            self.sgd.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    net = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    apply = Accumulator(net, torch.optim.SGD(net.parameters(), lr=0.02), 4)
    torch.manual_seed(70 + dist.get_rank())
    criterion = nn.BCEWithLogitsLoss()
    for number in range(16):
        rows = torch.randn(6, 3)
        wanted = (rows[:, :1] > 0).float()
        if number % 4 == 3:
            apply(criterion(net(rows), wanted))
        else:
            with net.no_sync():
                apply(criterion(net(rows), wanted))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
