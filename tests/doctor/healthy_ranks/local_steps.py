"""Every process trains alone for a while; then the parameters are averaged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

EVERY = 2


@torch.no_grad()
def average_parameters(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        with model.no_sync():
            loss = model(torch.randn(8, 6)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            average_parameters(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
