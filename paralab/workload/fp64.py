"""Convert a model and its data to fp64, including complex numbers, which `model.double()` skips."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paralab.workload.batch import map_tensors


def model_in_fp64(model: nn.Module) -> nn.Module:
    """Convert in place, and return the model."""
    converted: nn.Module = model._apply(_in_fp64)
    return converted


def batch_in_fp64(batch: Any) -> Any:
    return map_tensors(_in_fp64, batch)


def _in_fp64(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor
