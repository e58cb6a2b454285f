# start: python
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, SequentialLR

STEPS_PER_UPDATE = 2


def warmup(opt):
    rising = LambdaLR(opt, lambda k: min(1.0, (k + 1) / 3))
    return SequentialLR(opt, [rising, ConstantLR(opt, factor=1.0)], milestones=[3])


class Experiment:
    def __init__(self):
        self.net = nn.Linear(4, 1)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.schedule = warmup(self.opt)

    def update(self):
        self.opt.step()
        self.opt.zero_grad()
        self.schedule.step()

    def run(self, n):
        for k in range(n):
            x = torch.randn(4, 4)
            value = self.net(x).square().mean() / STEPS_PER_UPDATE
            value.backward()
            if k % STEPS_PER_UPDATE == STEPS_PER_UPDATE - 1:
                self.update()
        print(self.schedule.get_last_lr())


torch.manual_seed(0)
Experiment().run(8)
