"""Prints the number of ranks."""

from datetime import timedelta

import torch
import torch.distributed as dist


def main():
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=20))
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{dist.get_node_local_rank()}"
        torch.cuda.set_device(device)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()}: {int(total)} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
