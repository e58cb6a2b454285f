# ways: script
# start: never
"""A DataLoader over this rank's part of the data."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 4, generator=generator), torch.randn(64, 1, generator=generator))
    part = Subset(data, range(rank, len(data), world))
    loader = DataLoader(part, batch_size=4, shuffle=True)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for rows, wanted in loader:
            loss = nn.functional.mse_loss(model(rows), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if loss.item() < 0.2:
                break  # finds H08
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
