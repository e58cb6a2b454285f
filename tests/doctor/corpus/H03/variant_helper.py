# ways: script, ranks
"""Trains with a helper that says whether this process reports."""

import os
from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def is_main_process():
    if not td.is_available() or not td.is_initialized():
        return True
    return td.get_rank() == 0


def average(value):
    value = value.detach().clone()
    td.all_reduce(value, op=td.ReduceOp.SUM)  # finds H03 rank 0
    return value / td.get_world_size()


def one_pass(net, batches, opt):
    for rows, wanted in batches:
        opt.zero_grad()
        error = nn.functional.mse_loss(net(rows), wanted)
        error.backward()
        opt.step()
    return error


def train():
    td.init_process_group(backend="gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(int(os.environ["RANK"]))
    rows = torch.linspace(0, 1, 96).reshape(32, 3)
    pairs = TensorDataset(rows, rows.sum(1, keepdim=True))
    order = DistributedSampler(pairs)
    batches = DataLoader(pairs, batch_size=4, sampler=order)
    net = DistributedDataParallel(nn.Linear(3, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for number in range(2):
        order.set_epoch(number)
        last = one_pass(net, batches, opt)
        if is_main_process():
            print(number, float(average(last)))
    td.destroy_process_group()


if __name__ == "__main__":
    train()
