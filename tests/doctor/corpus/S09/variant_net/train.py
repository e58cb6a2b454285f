# ways: script
"""Trains the network from the other module."""

import argparse
import os

import torch
import torch.distributed as td
from net import ConvNet
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=2)
    options = parser.parse_args()
    td.init_process_group("nccl")
    number = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(number)
    torch.manual_seed(td.get_rank())
    pictures = TensorDataset(torch.rand(64, 3, 8, 8), torch.arange(64) % 4)
    order = DistributedSampler(pictures, drop_last=True)
    batches = DataLoader(pictures, options.batch, sampler=order)
    net = nn.parallel.DistributedDataParallel(ConvNet(4).cuda(), device_ids=[number])  # finds S09
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        order.set_epoch(epoch)
        for picture, label in batches:
            opt.zero_grad()
            nn.functional.cross_entropy(net(picture.cuda()), label.cuda()).backward()
            opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
