import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as Ddp


def losses(net, x):
    out = net(x)
    return (out - x).pow(2).mean()


def update(net, opt, x):
    value = losses(net, x)
    opt.zero_grad()
    value.backward()
    opt.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3 + dist.get_rank())
    net = Ddp(nn.Linear(4, 4))
    opt = optim.Adam(net.parameters())
    for _ in range(3):
        update(net, opt, torch.randn(6, 4))
    dist.destroy_process_group()


main()
