"""Besides the process group, the ranks use their own store to share their progress."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

PORT = 29587


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)
    table = dist.TCPStore("127.0.0.1", PORT, world, is_master=rank == 0, timeout=timedelta(seconds=4))
    model = DDP(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss = model(torch.randn(8, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        table.set(f"rank {rank}", str(step))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
