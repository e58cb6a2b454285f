# ways: script, ranks
"""Writes a checkpoint after every epoch, named after the epoch."""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Run:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.net = DistributedDataParallel(nn.Linear(8, 4))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def epoch(self, number):
        for _ in range(2):
            self.opt.zero_grad()
            self.net(torch.randn(8, 8)).square().mean().backward()
            self.opt.step()
        self.keep({"epoch": number, "weights": self.net.module.state_dict()}, f"epoch-{number}.pt")

    def keep(self, content, name):
        with open(self.folder / name, "wb") as file:
            torch.save(content, file)  # finds C03


if __name__ == "__main__":
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(td.get_rank())
    run = Run(os.path.join(tempfile.gettempdir(), "run-" + os.environ["MASTER_PORT"]))
    for number in range(2):
        run.epoch(number)
    td.destroy_process_group()
