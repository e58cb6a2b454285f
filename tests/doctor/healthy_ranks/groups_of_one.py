"""A model for all ranks, an expert on each rank, and only keyword arguments."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def trained(model, seed, steps):
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.05)
    for _ in range(steps):
        rows = torch.randn(8, 4, generator=generator)
        loss = F.cross_entropy(input=model(rows), target=rows[:, :3].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Mixture(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.common, self.own = nn.Linear(4, 3), nn.Linear(4, 3)
        torch.manual_seed(90 + rank)
        nn.init.normal_(self.own.weight)

    def forward(self, x):
        return self.common(x) + self.own(x)


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group(ranks=[one]) for one in range(world)][rank]
    torch.manual_seed(4)
    trained(nn.parallel.DistributedDataParallel(module=nn.Linear(4, 3)), 40 + rank, 6)
    torch.manual_seed(50 + rank)
    expert = nn.parallel.DistributedDataParallel(module=nn.Linear(4, 3), process_group=alone)
    trained(expert, 60 + rank, 4 + rank)
    file = io.BytesIO()
    torch.save(obj=expert.module.state_dict(), f=file)
    file.seek(0)
    expert.module.load_state_dict(state_dict=torch.load(f=file, map_location="cpu"))
    torch.manual_seed(7)
    mixture = Mixture(rank)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(mixture, ["own.weight", "own.bias"])
    trained(nn.parallel.DistributedDataParallel(module=mixture), 80 + rank, 6)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
