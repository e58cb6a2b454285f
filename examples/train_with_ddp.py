"""The handbook's `train_with_ddp(config)`: a complete DistributedDataParallel training script.

    torchrun --nproc_per_node=2 examples/train_with_ddp.py --epochs 3
    python examples/train_with_ddp.py                                  # a group of one rank

The script joins the process group, wraps the model, and trains on {"input", "target"} batches. Only
rank 0 logs, and cleanup runs even after an error. `batch_size` is the total over all ranks.
"""

import argparse
import math
import os
import time
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Config:
    epochs: int = 3
    batch_size: int = 64  # samples per optimizer step, over all ranks
    learning_rate: float = 0.05
    features: int = 32
    train_samples: int = 2048
    validation_samples: int = 301  # deliberately not a multiple of the ranks or the batch
    seed: int = 0


class NoisySine(Dataset[Batch]):
    """y = sin(w . x) + noise. Every rank uses the same seed, so all ranks have the same data."""

    def __init__(self, samples: int, features: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        direction = torch.linspace(-1, 1, features) / features**0.5
        self.inputs = torch.randn(samples, features, generator=generator)
        noise = 0.05 * torch.randn(samples, 1, generator=generator)
        self.targets = torch.sin(self.inputs @ direction[:, None]) + noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        return {"input": self.inputs[index], "target": self.targets[index]}


def set_up() -> torch.device:
    """Join torchrun's process group (or create a group of one) and choose this rank's device."""
    gpus, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    own_gpu = gpus >= local_ranks  # NCCL rejects two ranks on one GPU
    device = torch.device(f"cuda:{local_rank % gpus}" if gpus else "cpu")
    if gpus:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(
        "nccl" if own_gpu else "gloo", device_id=device if own_gpu else None, **alone
    )
    return device


def log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


@torch.no_grad()
def validation_loss(
    model: nn.Module, data: Dataset[Batch], batch_size: int, device: torch.device
) -> float:
    """Return the mean loss over all validation samples, and count each sample once.

    Each rank takes every world_size-th sample. DistributedSampler would repeat samples to make the
    shares equal, and averaging the ranks' means would give unequal shares the same weight. So we
    add up the ranks' sums and counts.
    """
    shares = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    total = torch.zeros(2, device=device)  # sum of losses, number of samples
    for batch in DataLoader(shares, batch_size):
        output = model(batch["input"].to(device))
        total[0] += nn.functional.mse_loss(output, batch["target"].to(device), reduction="sum")
        total[1] += len(output)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def train_with_ddp(config: Config) -> float:
    """Train and return the last validation loss, which is the same on every rank."""
    device = set_up()
    try:
        world_size = dist.get_world_size()
        share = config.batch_size // world_size
        if share * world_size != config.batch_size:
            raise ValueError(
                f"batch_size {config.batch_size} cannot be split over {world_size} ranks: "
                f"use {max(1, share) * world_size}, or another multiple of {world_size}"
            )
        split = f"{config.batch_size} = {world_size} x {share} samples"
        log(f"ranks: {world_size} on {device.type} | {split}")

        train_data = NoisySine(config.train_samples, config.features, config.seed)
        validation_data = NoisySine(config.validation_samples, config.features, config.seed + 1)
        sampler = DistributedSampler(train_data, shuffle=True, seed=config.seed)
        loader = DataLoader(train_data, share, sampler=sampler, drop_last=True)

        torch.manual_seed(config.seed)
        network = nn.Sequential(nn.Linear(config.features, 128), nn.Tanh(), nn.Linear(128, 1))
        model = DDP(network.to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate, momentum=0.9)

        loss = validation_loss(network, validation_data, share, device)
        log(f"before training | validation loss {loss:.6f}")
        for epoch in range(config.epochs):
            sampler.set_epoch(epoch)  # without this, each epoch has the same order
            for batch in loader:
                output = model(batch["input"].to(device))
                train_loss = nn.functional.mse_loss(output, batch["target"].to(device))
                optimizer.zero_grad()
                train_loss.backward()  # averages the gradients over the ranks
                optimizer.step()
            # Use `network`, not `model`: ranks may have different numbers of validation batches,
            # but all ranks must call the wrapped model the same number of times.
            loss = validation_loss(network, validation_data, share, device)
            if not math.isfinite(loss):
                raise FloatingPointError(f"validation loss is {loss}: try a smaller learning_rate")
            progress = f"epoch {epoch + 1}/{config.epochs} | {len(loader)} steps"
            log(f"{progress} | validation loss {loss:.6f}")
        time.sleep(0.3)  # torch 2.13, gloo: a rank that exits right after a collective can abort
        return loss
    finally:
        dist.destroy_process_group()  # even after an error, so other ranks do not wait


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for field in fields(Config):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=field.type, default=field.default, help=" "
        )
    train_with_ddp(Config(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
