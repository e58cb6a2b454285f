"""Memory layouts: DDP's buckets have the strides that the parameters had when it wrapped them. A
gradient with different strides must be copied."""

from typing import Any

import torch
from torch import nn

MOST = 20  # number of gradients to report


def strides_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the strides of each parameter, skipping those with gaps or overlaps: their buckets
    have different strides."""
    return {name: p.stride() for name, p in module.named_parameters() if _is_dense(p)}


def _is_dense(parameter: torch.Tensor) -> bool:
    last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return last or parameter.is_contiguous()


def laid_otherwise(module: nn.Module, wrapped: dict[str, tuple[int, ...]]) -> list[list[Any]]:
    """Return [name, shape, gradient strides, bucket strides] for each gradient whose strides differ
    from its bucket's."""
    found: list[list[Any]] = []
    for name, parameter in module.named_parameters():
        gradient, strides = parameter.grad, wrapped.get(name)
        if gradient is None or strides is None or gradient.is_sparse:
            continue
        if gradient.stride() != strides:
            found.append([name, list(parameter.shape), list(gradient.stride()), list(strides)])
    return found[:MOST]
