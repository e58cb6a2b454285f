"""`mlp`: the linear layers and classifier of the practicals, on noisy vectors in 10 classes."""

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
        hidden = [nn.Linear(dim, dim) for _ in range(layers)]
        for layer in hidden:  # torch's default weights are too small to learn through many layers
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        layers_and_relus = [part for layer in hidden for part in (layer, nn.ReLU())]
        return nn.Sequential(*layers_and_relus, nn.Linear(dim, CLASSES))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) / loss_divisor

    return Workload(
        model=model,
        data=(inputs, labels),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.005, momentum=0.9),
        batch_size=batch_size,
        data_path=(
            f"synthetic: {samples} vectors of length {dim} in {CLASSES} classes, from a fixed seed"
        ),
        name=name,
    )
