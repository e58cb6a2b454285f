from contextlib import ExitStack

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Replicated


class Loop:
    def __init__(self, module, every):
        self.net = Replicated(module)
        self.every = every
        self.count = 0
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def micro_step(self, x):
        self.count += 1
        update = self.count % self.every == 0
        with ExitStack() as stack:
            if not update:
                stack.enter_context(self.net.no_sync())
            objective = self.net(x).square().mean() / self.every
            objective.backward()
        if update:
            self.opt.step()
            self.opt.zero_grad()


def main():
    td.init_process_group("gloo")
    torch.manual_seed(td.get_rank())
    loop = Loop(nn.Linear(5, 5), every=2)
    for _ in range(6):
        loop.micro_step(torch.randn(3, 5))
    td.destroy_process_group()


if __name__ == "__main__":
    main()
