"""`cnn`: convolutions with BatchNorm on synthetic images. BatchNorm uses only the samples
of its own replica, so data parallelism legitimately differs from a single device."""

from __future__ import annotations

import torch
from torch import nn

from paralab.workload.workload import Workload

CLASSES = 10


def build(
    name: str, *, width: int, blocks: int, pixels: int, samples: int, batch_size: int
) -> Workload:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 3, pixels, pixels, generator=generator)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    images = patterns[labels] * 0.5 + torch.randn(samples, 3, pixels, pixels, generator=generator)

    def block(channels_in: int, channels_out: int) -> nn.Sequential:
        # Use no bias. BatchNorm subtracts the mean, so a bias's gradient would be rounding noise.
        convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU())

    def model() -> nn.Module:
        # The order in which modules are created determines their initial weights.
        body = [block(width, width) for _ in range(blocks - 1)]
        first, pool = block(3, width), nn.AdaptiveAvgPool2d(2)
        return nn.Sequential(first, *body, pool, nn.Flatten(), nn.Linear(width * 4, CLASSES))

    return Workload(
        model=model,
        data={"input": images, "target": labels},
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        batch_size=batch_size,
        data_path=(
            f"synthetic: {samples} images of {pixels}×{pixels} pixels in {CLASSES} classes, "
            "from a fixed seed"
        ),
        name=name,
    )
