import os

import torch
import torch.distributed as td
import torch.utils.data as data
from torch.nn import Linear, parallel
from torch.nn import functional as F


class Squares(data.Dataset):
    def __init__(self, n):
        self.x = torch.linspace(-1, 1, n).unsqueeze(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.x[i] ** 2


def make_loader(ds, bs):
    return data.DataLoader(ds, bs, sampler=data.DistributedSampler(ds), num_workers=0, drop_last=True)


class Trainer:
    def __init__(self, net, batches):
        self.net = parallel.DistributedDataParallel(net)
        self.batches = batches
        self.opt = torch.optim.Adam(self.net.parameters())

    def epoch(self, number):
        self.batches.sampler.set_epoch(number)
        for x, y in self.batches:
            self.opt.zero_grad()
            F.mse_loss(self.net(x), y).backward()
            self.opt.step()

    def fit(self, epochs):
        for number in range(epochs):
            self.epoch(number)


if __name__ == "__main__":
    td.init_process_group(backend="gloo")
    torch.manual_seed(int(os.environ["RANK"]))
    Trainer(Linear(1, 1), make_loader(Squares(24), 4)).fit(2)
    td.destroy_process_group()
