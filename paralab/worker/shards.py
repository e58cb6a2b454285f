"""Parameters that are spread over ranks (DTensors): this rank's part of one, or all of it. An
ordinary tensor is both."""

from __future__ import annotations

from typing import Any

import torch

# Asked by name, not by type: importing DTensor takes half a second, and only one strategy has any.


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    found: Any = tensor
    return found.detach().to_local() if is_sharded(tensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it. Every rank must ask, in the same order: it is gathered from all."""
    found: Any = tensor
    return found.detach().full_tensor() if is_sharded(tensor) else tensor
