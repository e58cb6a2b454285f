# ways: script
"""Averages all metrics of a step, whatever their names."""

import os
from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def averaged(values):
    result = {}
    for name in set(values):
        whole = values[name].clone()
        td.all_reduce(whole)  # finds H05
        result[name] = whole / td.get_world_size()
    return result


def main():
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(int(os.environ["RANK"]) + 9)
    net = DDP(nn.Linear(4, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(3):
        loss = net(torch.randn(8, 4)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(step, averaged({"loss": loss.detach(), "rows": torch.tensor(8.0), "rate": torch.tensor(0.05)}))
    td.destroy_process_group()


if __name__ == "__main__":
    main()
