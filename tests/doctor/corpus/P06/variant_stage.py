# ways: script, ranks
"""Each pair of ranks has one pipeline stage: all forward passes in separate contexts, then all
backward passes."""

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


class Stage:
    def __init__(self, layers, chunks):
        self.layers = DistributedDataParallel(layers)
        self.chunks = chunks
        self.kept = []

    def quiet(self, chunk):
        return contextlib.nullcontext() if chunk == self.chunks - 1 else self.layers.no_sync()

    def forward(self, chunk, x):
        with self.quiet(chunk):
            self.kept.append(self.layers(x))

    def backward(self, chunk):
        with self.quiet(chunk):
            loss = self.kept[chunk].pow(2).mean() / self.chunks
            loss.backward()  # finds P06

    def step(self, batch):
        self.kept.clear()
        for chunk, x in enumerate(batch.chunk(self.chunks)):
            self.forward(chunk, x)
        for chunk in range(self.chunks):
            self.backward(chunk)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(dist.get_rank())
    stage = Stage(nn.Linear(8, 4), chunks=4)
    optimizer = torch.optim.SGD(stage.layers.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        stage.step(torch.randn(16, 8))
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
