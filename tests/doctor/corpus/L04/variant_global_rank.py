# ways: script
"""A function chooses the device."""

import os

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Wrapped


def choose():
    number = int(os.environ["RANK"])
    torch.cuda.set_device(number)  # finds L04
    return torch.device("cuda", number)


def main():
    td.init_process_group("nccl")
    device = choose()
    torch.manual_seed(td.get_rank())
    net = Wrapped(nn.Linear(8, 4).to(device), device_ids=[device])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        net(torch.randn(8, 8, device=device)).square().mean().backward()
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
