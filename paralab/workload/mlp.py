"""`mlp`: the model from the practicals, linear layers of width DIM, on noisy vectors."""

from __future__ import annotations

import torch
from torch import nn

from paralab.workload.workload import Workload

CLASSES = 10


def build(
    name: str, *, dim: int, layers: int, samples: int, batch_size: int, loss_divisor: int = 1
) -> Workload:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, dim, generator=generator)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    inputs = patterns[labels] + torch.randn(samples, dim, generator=generator)

    def model() -> nn.Module:
        hidden = [part for _ in range(layers - 1) for part in (nn.Linear(dim, dim), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(dim, dim))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) / loss_divisor

    return Workload(
        model=model,
        data=(inputs, labels),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        batch_size=batch_size,
        data_path=(
            f"synthetic: {samples} vectors of length {dim} in {CLASSES} classes, from a fixed seed"
        ),
        name=name,
    )
