# ways: script, ranks
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, accumulation):
        self.model = DDP(nn.Linear(6, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.accumulation = accumulation

    def context(self, index):
        return contextlib.nullcontext() if index % self.accumulation == 0 else self.model.no_sync()

    def run(self, batches):
        for index, (x, y) in enumerate(batches):
            with self.context(index):
                loss = nn.functional.cross_entropy(self.model(x), y)
                (loss / self.accumulation).backward()
            if (index + 1) % self.accumulation == 0:
                self.optimizer.step()  # finds G04
                self.optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    batches = [(torch.randn(4, 6), torch.randint(0, 2, (4,))) for _ in range(6)]
    Trainer(3).run(batches)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
