# ways: script
"""Saves from the CPU after every epoch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def save(model, device):
    model.cpu()  # finds S12
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
    model.to(device)
    dist.barrier()


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(1 + dist.get_rank())
    model = DDP(nn.Linear(8, 4).to(device), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for _ in range(3):
            loss = model(torch.randn(8, 8, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save(model, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
