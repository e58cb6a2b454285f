"""Find layers whose experts can run on other ranks. Such a layer is a submodule

- whose parameters all have the expert as dim 0, and
- that a router calls with tokens, the experts that each token chose, and their weights.

        experts(tokens [t, d], chosen [t, k], weights [t, k])  ->  [t, d]

The built-in `moe` and all mixture-of-experts models in transformers 5 have such layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from paralab.workload.batch import tensors

MATRIX = 3  # dims of the parameter that has a matrix for each expert


class ExpertCall(NamedTuple):
    """The positions of the three tensors in a call's arguments."""

    tokens: int
    chosen: int
    weights: int


def stacked_experts(model: nn.Module) -> dict[str, int]:
    """Return the names of submodules that may be expert layers, and their numbers of experts. They
    may be nested: a gate's weight has a row for each expert, too."""
    sizes = {name: _count_experts(module) for name, module in model.named_modules() if name}
    return {name: size for name, size in sizes.items() if size}


def _count_experts(module: nn.Module) -> int:
    """Return the common size of dim 0 of all parameters, or 0."""
    parameters = list(module.parameters())
    sizes = {each.shape[0] if each.ndim else 0 for each in parameters}
    is_convolution = isinstance(module, nn.modules.conv._ConvNd)
    if len(sizes) != 1 or is_convolution or MATRIX not in {each.ndim for each in parameters}:
        return 0
    size = sizes.pop()
    return size if size > 1 else 0


def read_call(arguments: Any) -> ExpertCall | None:
    """Find the three tensors in the arguments, or return None if there are others."""
    given = list(tensors(arguments))
    whole = [n for n, each in enumerate(given) if not each.is_floating_point()]
    if len(given) != 3 or len(whole) != 1:
        return None
    chosen = given[whole[0]]
    first, second = (n for n in range(3) if n != whole[0])
    # If both have the same shape, the tokens come first.
    if given[second].shape == chosen.shape:
        tokens, weights = first, second
    else:
        tokens, weights = second, first
    rows = given[tokens]
    fits = given[weights].shape == chosen.shape and rows.ndim == 2 and len(rows) == len(chosen)
    is_index = chosen.dtype in (torch.int64, torch.int32) and chosen.ndim in (1, 2)
    return ExpertCall(tokens, whole[0], weights) if fits and is_index else None
