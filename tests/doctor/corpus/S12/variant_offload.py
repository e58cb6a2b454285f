# ways: script
"""Frees GPU memory for another computation."""

import os

import torch
import torch.distributed as td
from torch import nn


class Session:
    def __init__(self):
        self.number = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.number)
        td.init_process_group("nccl", device_id=torch.device("cuda", self.number))
        torch.manual_seed(td.get_rank())
        self.agent = nn.parallel.DistributedDataParallel(nn.Linear(8, 4).cuda(), device_ids=[self.number])
        self.opt = torch.optim.SGD(self.agent.parameters(), lr=0.1)

    def learn(self):
        for _ in range(3):
            self.opt.zero_grad()
            self.agent(torch.randn(8, 8).cuda()).square().mean().backward()
            self.opt.step()

    def rest(self):
        self.agent.module.to("cpu")  # finds S12

    def wake(self):
        self.agent.module.to(f"cuda:{self.number}")


if __name__ == "__main__":
    session = Session()
    for _ in range(3):
        session.learn()
        session.rest()
        session.wake()
    td.destroy_process_group()
