# ways: script
# start: never
"""Each rank takes every second row."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(64, 4, generator=generator)
    shard = data[rank::2]
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in shard.split(4):
        loss = model(rows).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.2:
            break  # finds H08
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
