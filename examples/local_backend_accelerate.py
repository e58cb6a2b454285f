"""Accelerate on paralab's backend for ranks on one machine: pip install accelerate

torchrun --nproc_per_node=2 examples/local_backend_accelerate.py
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

import paralab.collectives  # noqa: F401  this line registers the backend


def main() -> None:
    dist.init_process_group("local")  # Accelerate uses the group that it finds
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(accelerator.process_index)
    for step in range(20):
        inputs = torch.randn(64, 32)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % 5 == 0:
            mean = accelerator.gather(loss.detach().reshape(1)).mean().item()
            name = dist.get_backend()
            accelerator.print(f"step {step:2}: mean loss {mean:.3f} over {name}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
