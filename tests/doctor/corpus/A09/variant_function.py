# ways: script
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def half():
    return torch.autocast(device_type="cpu", dtype=torch.float16)


def work(net, x):
    loss = net(x).float().square().mean()
    loss.backward()  # finds A09
    return loss


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = DDP(nn.Linear(4, 4))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        with half():
            work(net, torch.randn(4, 4))
        opt.step()
    dist.destroy_process_group()


main()
