# ways: script
"""Fine-tunes from a file that another program wrote."""

import argparse

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, rows):
        return self.head(self.body(rows).relu())


def resume(net, path):
    state = torch.load(path, map_location="cpu", weights_only=True)
    net.load_state_dict(state, False)  # finds C02
    return net


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", required=True)
    options = parser.parse_args()
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    net = DistributedDataParallel(resume(Net(), options.weights))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        net(torch.randn(8, 8)).square().mean().backward()
        opt.step()
    td.destroy_process_group()


if __name__ == "__main__":
    main()
