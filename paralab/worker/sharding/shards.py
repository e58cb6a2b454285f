"""Get this rank's shard of a parameter, or the full tensor. Without sharding, both are the same."""

from __future__ import annotations

from typing import Any

import torch

# Check an attribute, not the type, because importing DTensor (for fsdp and tp) takes half a second.


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def is_split(tensor: torch.Tensor) -> bool:
    """Return whether each shard has only a part of the tensor. A DTensor may also be replicated, or
    be sharded over the replicas."""
    sharded: Any = tensor
    names = (is_sharded(tensor) and sharded.device_mesh.mesh_dim_names) or ()
    return "shards" in names and not sharded.placements[-1].is_replicate()


def in_pieces(tensor: torch.Tensor) -> bool:
    """Return whether this rank's shard consists of several pieces of the full tensor (q, k, and v
    of one matrix). DCP cannot store such a shard."""
    # FSDP's own placement is also strided if tensor parallelism splits the same dim first.
    placements = getattr(tensor, "placements", (None,))
    return getattr(placements[-1], "split_factor", 1) > 1


def shard_of(full: torch.Tensor, dim: int, parts: int, mesh: Any) -> torch.Tensor:
    """Return this rank's shard of a tensor that is `parts` matrices side by side: q1 k1 v1."""
    pieces = [part.chunk(mesh.size(), dim) for part in full.chunk(parts, dim)]
    return torch.cat([piece[mesh.get_local_rank()] for piece in pieces], dim)


def shard_like(full: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Shard the full tensor in the same way as `tensor`, whose shards have multiple pieces."""
    like: Any = tensor
    [placement], mesh = like.placements, like.device_mesh
    own = shard_of(full, placement.dim, placement.split_factor, mesh)
    result: torch.Tensor = type(like).from_local(own, mesh, [placement], run_check=False)
    return result


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard."""
    sharded: Any = tensor
    return sharded.detach().to_local() if is_sharded(tensor) else tensor


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor, and pass gradients back. A loss of split logits is a DTensor."""
    sharded: Any = tensor
    return sharded.full_tensor() if is_sharded(tensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor, without its graph. All ranks must call this in the same order."""
    return gathered(tensor.detach()) if is_sharded(tensor) else tensor
