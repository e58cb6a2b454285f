"""Batches of unequal size. The loss is divided by the samples of all ranks, so gradients and losses
are summed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def added_up(gradients):
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    at = 0
    for gradient in gradients:
        gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
        at += gradient.numel()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = nn.Linear(5, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    torch.manual_seed(30 + rank)
    inputs = torch.randn(24 + 8 * rank, 5)
    data = TensorDataset(inputs, inputs[:, :1] - inputs[:, 1:2])
    for epoch in range(2):
        for x, y in DataLoader(data, batch_size=6 + 2 * rank, shuffle=True):
            count = torch.tensor(float(len(x)))
            dist.all_reduce(count)
            loss = (net(x) - y).square().sum() / count
            optimizer.zero_grad()
            loss.backward()
            added_up([parameter.grad for parameter in net.parameters()])
            optimizer.step()
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"epoch {epoch}: {shown.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
