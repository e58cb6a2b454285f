"""Each step uses the gradients of three batches, counted over all epochs: a pass of five batches
ends inside a window."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    seen = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            seen += 1
            with model.no_sync() if seen % 3 else nullcontext():
                (F.mse_loss(model(x), y) / 3).backward()
            if seen % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
