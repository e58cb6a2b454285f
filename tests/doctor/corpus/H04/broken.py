# ways: script, ranks
"""Rank 0 sends a table, and all ranks add up a count."""

from datetime import timedelta

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    table = torch.arange(6.0) if rank == 0 else torch.zeros(6)
    count = torch.ones(2)
    if rank == 0:
        dist.broadcast(table, src=0)  # finds H04
        dist.all_reduce(count)
    else:
        dist.all_reduce(count)
        dist.broadcast(table, src=0)
    print(f"rank {rank}: {table.sum().item()} {count.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
