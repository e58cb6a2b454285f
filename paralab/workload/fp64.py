"""Convert a model and its data to fp64, including complex numbers, which `model.double()` skips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paralab.workload.batch import map_tensors, tensors


def model_in_fp64(model: nn.Module) -> nn.Module:
    """Convert in place, and return the model. Also convert tensors that are plain attributes, such
    as fixed random projections."""
    converted: nn.Module = model._apply(_in_fp64)
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_leaf:
                vars(module)[key] = _in_fp64(value)
    return converted


def loss_in_fp64(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a loss that also works if it has tensors in fp32, such as the weights of classes."""

    def promoting(output: Any, target: Any) -> Any:
        with _Promoting():
            return loss(output, target)

    return promoting


class _Promoting(TorchFunctionMode):
    """If a function rejects a mix of fp32 and fp64 tensors, convert them to fp64 and call it
    again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            both = {torch.float32, torch.float64}
            if func.__name__.endswith("_") or not both <= {
                t.dtype for t in tensors((args, kwargs))
            }:
                raise
            args, kwargs = map_tensors(_in_fp64, (args, kwargs))
            return func(*args, **kwargs)


def batch_in_fp64(batch: Any) -> Any:
    return map_tensors(_in_fp64, batch)


def _in_fp64(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor
