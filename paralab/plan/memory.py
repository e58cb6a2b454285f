"""The formula that the page uses for a device's memory under each strategy. These are pure
functions on plain numbers. `paralab.plan.estimate` counts each tensor, but needs a trial.

With n devices, for parameters p, gradients g, optimizer state o, and activations a per sample:

    single     p + g + o         + a · batch
    dp, ddp    p + g + o         + a · batch / n    each device has the whole model
    fsdp       (p + g + o) / n   + a · batch / n    excluding the layers that it gathers
    pipeline   (p + g + o) / n   + a · batch / n    each stage keeps its activations of all samples

The batch is divided like torch.chunk, and the largest share counts. Autocast halves activations
and keeps everything else in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

from paralab.plan.batches import chunk_sizes

STRATEGIES = ("single", "dp", "ddp", "fsdp", "pipeline")
ACTIVATION_SHARE = {"fp32": 1.0, "bf16": 0.5}


class DeviceMemory(NamedTuple):
    """Bytes on the device that needs the most."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float


def device_memory(
    strategy: str, devices: int, batch_size: int, whole: DeviceMemory, precision: str = "fp32"
) -> DeviceMemory:
    """Divide the memory. `whole` is a single device's memory for one sample."""
    pieces = devices if strategy in ("fsdp", "pipeline") else 1
    samples = {"single": batch_size, "pipeline": batch_size / devices}.get(
        strategy, chunk_sizes(batch_size, devices)[0]
    )
    return DeviceMemory(
        whole.parameters / pieces,
        whole.gradients / pieces,
        whole.optimizer / pieces,
        whole.activations * ACTIVATION_SHARE[precision] * samples,
    )
