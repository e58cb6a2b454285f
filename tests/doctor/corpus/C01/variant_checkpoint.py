# ways: script, ranks, log
"""A class saves and loads checkpoints."""

import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Checkpoints:
    def __init__(self, folder):
        self.path = os.path.join(folder, "last.pt")

    def write(self, net, opt, step):
        content = {"net": net.state_dict(), "opt": opt.state_dict(), "step": step}
        torch.save(content, self.path)  # finds C01

    def read(self, net):
        content = torch.load(self.path, map_location="cpu")
        net.load_state_dict(content["net"])
        return content["step"]


def main():
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(td.get_rank() + 4)
    wrapped = DistributedDataParallel(nn.Linear(8, 4))
    opt = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(3):
        opt.zero_grad()
        wrapped(torch.randn(8, 8)).square().mean().backward()
        opt.step()
    if td.get_rank() == 0:
        checkpoints = Checkpoints(tempfile.mkdtemp())
        checkpoints.write(wrapped, opt, step)
        print("last step:", checkpoints.read(nn.Linear(8, 4)))
    td.destroy_process_group()


if __name__ == "__main__":
    main()
