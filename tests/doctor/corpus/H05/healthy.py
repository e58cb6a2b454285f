"""Adds up a loss and an accuracy over the ranks."""

from datetime import timedelta

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    loss = torch.tensor(1.0 + rank)
    accuracy = torch.tensor(100.0 + rank)
    dist.all_reduce(loss)
    dist.all_reduce(accuracy)
    print(f"rank {rank}: loss {loss.item() / world} accuracy {accuracy.item() / world}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
