# ways: ranks
"""Returns from the training function as soon as an epoch is good enough."""

from datetime import timedelta

import torch
import torch.distributed as td
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Wrapped
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def fit(net, opt, batches, order, enough):
    history = []
    for epoch in range(40):
        order.set_epoch(epoch)
        for rows, wanted in batches:
            opt.zero_grad()
            error = (net(rows) - wanted).abs().mean()
            error.backward()
            opt.step()
            history.append(error.item())
        recent = sum(history[-4:]) / 4
        if recent < enough:
            return history  # finds H08
    return history


def main():
    td.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(td.get_rank() + 1)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(32, 3, generator=generator)
    pairs = TensorDataset(rows, rows.sum(1, keepdim=True) + torch.randn(32, 1, generator=generator))
    order = DistributedSampler(pairs)
    net = Wrapped(nn.Linear(3, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    history = fit(net, opt, DataLoader(pairs, batch_size=4, sampler=order), order, 0.7)
    print(f"rank {td.get_rank()}: {len(history)} steps")
    td.destroy_process_group()


if __name__ == "__main__":
    main()
