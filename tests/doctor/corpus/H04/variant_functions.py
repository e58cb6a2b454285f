# ways: script, ranks
"""The first process sends its settings, the others receive them, and then all synchronize."""

import os
from datetime import timedelta

import torch
import torch.distributed as td

first = int(os.environ["RANK"]) == 0


def give(settings):
    td.broadcast(settings, 0)  # finds H04


def take():
    received = torch.zeros(4)
    td.barrier()
    td.broadcast(received, 0)
    return received


def agree():
    if first:
        settings = torch.tensor([1.0, 2.0, 3.0, 4.0])
        give(settings)
        td.barrier()
    else:
        settings = take()
    return settings


if __name__ == "__main__":
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    print(agree())
    td.destroy_process_group()
