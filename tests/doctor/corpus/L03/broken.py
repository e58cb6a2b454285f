# ways: script
"""Every rank trains on a GPU."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)  # finds L03
    torch.manual_seed(1 + dist.get_rank())
    model = DDP(nn.Linear(8, 4).to(device), device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = model(torch.randn(8, 8, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"local rank {local_rank}: finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
