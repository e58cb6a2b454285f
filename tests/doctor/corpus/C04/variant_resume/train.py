# ways: script
"""Trains on GPUs. A second module handles the files."""

import os

import files
import torch
import torch.distributed as td
from torch import nn


def main():
    number = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(number)
    td.init_process_group(backend="nccl", device_id=torch.device("cuda", number))
    torch.manual_seed(td.get_rank())
    net = nn.Linear(8, 4)
    files.restore(net, "start.pt")
    net = nn.parallel.DistributedDataParallel(net.cuda(number), device_ids=[number])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        opt.zero_grad(set_to_none=True)
        net(torch.randn(8, 8).cuda(number)).square().mean().backward()
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
