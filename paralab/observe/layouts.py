"""How gradients lie in memory: DDP lays out its buckets as the parameters were when it wrapped
them, and a gradient that lies otherwise must be rearranged on its way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MOST = 20  # that are named


def strides_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of each parameter, as it is wrapped. Those with gaps or overlaps are left out: their buckets
    are laid out otherwise."""
    return {
        name: parameter.stride()
        for name, parameter in module.named_parameters()
        if _is_dense(parameter)
    }


def _is_dense(parameter: torch.Tensor) -> bool:
    last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return last or parameter.is_contiguous()


def laid_otherwise(module: nn.Module, wrapped: dict[str, tuple[int, ...]]) -> list[list[Any]]:
    """[name, shape, strides of the gradient, of the bucket] of each gradient that lies otherwise
    than its bucket."""
    found: list[list[Any]] = []
    for name, parameter in module.named_parameters():
        gradient, strides = parameter.grad, wrapped.get(name)
        if (
            gradient is None
            or strides is None
            or gradient.is_sparse
            or gradient.stride() == strides
        ):
            continue
        found.append([name, list(parameter.shape), list(gradient.stride()), list(strides)])
    return found[:MOST]
