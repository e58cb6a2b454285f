"""Plain PyTorch on paralab's backend for ranks on one machine. Two lines differ from gloo.

torchrun --nproc_per_node=2 examples/local_backend.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paralab.collectives  # noqa: F401  this line registers the backend


def main() -> None:
    dist.init_process_group("local")  # instead of "gloo"
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    for step in range(20):
        inputs = torch.randn(64, 32)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 and dist.get_rank() == 0:
            print(f"step {step:2}: loss {loss.item():.3f} over {dist.get_backend()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
