"""Needs a launcher, which gives every process its rank."""

from datetime import timedelta

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()}: {int(total)} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
