# ways: ranks, log
"""The embedding has one row for each word that this process has read."""

import os
from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TEXT = ["the sun is out", "rain is near and cold", "it is late", "snow fell on the roof today"]


class Reader(nn.Module):
    def __init__(self, lines):
        super().__init__()
        self.words = sorted({word for line in lines for word in line.split()})
        self.table = nn.Embedding(len(self.words), 4)

    def forward(self, line):
        return self.table(torch.tensor([self.words.index(word) for word in line.split()])).mean()


def main():
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    me = int(os.environ["RANK"])
    torch.manual_seed(me)
    mine = TEXT[2 * me : 2 * me + 2]
    net = DistributedDataParallel(Reader(mine))  # finds L07
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for line in mine:
        opt.zero_grad()
        net(line).backward()
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
