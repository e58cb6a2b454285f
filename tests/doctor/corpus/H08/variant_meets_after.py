# ways: script, ranks
"""Each epoch returns whether to run another one; at the end, all ranks synchronize."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Runner:
    def __init__(self, rank):
        torch.manual_seed(5)
        self.net = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        self.sgd = torch.optim.SGD(self.net.parameters(), lr=0.01)
        rows = torch.full((24, 2), 1.0 + rank)
        self.batches = DataLoader(TensorDataset(rows), batch_size=4)
        self.spent = 0.0

    def is_enough(self, loss):
        self.spent += loss
        return self.spent > 20

    def epoch(self):
        for (rows,) in self.batches:
            self.sgd.zero_grad()
            loss = (self.net(rows) - 3).square().mean()
            loss.backward()
            self.sgd.step()
            if self.is_enough(loss.item()):
                return False  # finds H08
        return True

    def fit(self):
        for _ in range(8):
            if not self.epoch():
                break
        dist.barrier()


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    Runner(dist.get_rank()).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
