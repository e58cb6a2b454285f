"""Get this rank's shard of a parameter, or the full tensor. Without sharding, both are the same."""

from __future__ import annotations

from typing import Any

import torch

# Check an attribute, not the type: only fsdp needs DTensor, whose import takes half a second.


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard."""
    sharded: Any = tensor
    return sharded.detach().to_local() if is_sharded(tensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor. All ranks must call this in the same order."""
    sharded: Any = tensor
    return sharded.detach().full_tensor() if is_sharded(tensor) else tensor
