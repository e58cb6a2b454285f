# ways: script
"""Two views of the same rows should have the same features."""

import os
from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv1d(1, 4, 3)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, signal):
        return self.norm(self.enter(signal)).mean(-1)


def contrast(encoder, signal):
    views = signal + 0.1 * torch.randn_like(signal), signal.flip(-1)
    one = encoder(views[0])
    two = encoder(views[1])  # finds S05
    return 1 - nn.functional.cosine_similarity(one, two).mean()


if __name__ == "__main__":
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(int(os.environ["RANK"]))
    encoder = DistributedDataParallel(Encoder())
    opt = torch.optim.SGD(encoder.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        contrast(encoder, torch.randn(32, 1, 12)).backward()
        opt.step()
    td.destroy_process_group()
