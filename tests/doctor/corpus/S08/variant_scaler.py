# ways: script, ranks
"""Mixed precision. One process does the work that is needed only once."""

import os
from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Loop:
    def __init__(self):
        self.main = os.environ["RANK"] == "0"
        self.net = DistributedDataParallel(nn.Linear(8, 4))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def once(self):
        self.scaler.step(self.opt)  # finds S08
        self.scaler.update()

    def batch(self, rows):
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            error = self.net(rows).float().square().mean()
        self.scaler.scale(error).backward()
        if self.main:
            self.once()


if __name__ == "__main__":
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(td.get_rank())
    loop = Loop()
    for _ in range(4):
        loop.batch(torch.randn(8, 8))
    td.destroy_process_group()
