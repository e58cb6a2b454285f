# ways: script
"""Trains on whatever GPU `cuda` means."""

import torch
from torch import distributed, nn, optim
from torch.nn.parallel import DistributedDataParallel


class Work:
    def __init__(self):
        distributed.init_process_group(backend="nccl")
        torch.manual_seed(distributed.get_rank())
        self.where = "cuda"
        self.net = nn.Linear(8, 4).to(self.where)  # finds L03
        self.net = DistributedDataParallel(self.net)
        self.opt = optim.SGD(self.net.parameters(), lr=0.1)

    def steps(self, many):
        for _ in range(many):
            self.opt.zero_grad()
            self.net(torch.randn(8, 8, device=self.where)).square().mean().backward()
            self.opt.step()


if __name__ == "__main__":
    Work().steps(4)
    distributed.destroy_process_group()
