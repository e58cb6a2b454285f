"""Continues from saved weights that may have a different head."""

import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    model = DDP(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = model(torch.randn(8, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        path = os.path.join(tempfile.mkdtemp(), "model.pt")
        torch.save(model.state_dict(), path)
        saved = torch.load(path, map_location="cpu")
        saved = {name.removeprefix("module."): tensor for name, tensor in saved.items()}
        tuned = network()
        missing, unexpected = tuned.load_state_dict(saved, strict=False)
        print(f"not found: {missing}, not used: {unexpected}")
        print(f"output {tuned(torch.ones(1, 8)).sum().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
