"""Split a parameter over the shards, and pass activations into and out of the split layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from paralab.worker.sharding.shards import shard_of
from paralab.worker.sharding.split_sequence import SplitSequence


def split_parameter(
    parameter: nn.Parameter, mesh: DeviceMesh, dim: int | None, parts: int = 1
) -> nn.Parameter:
    """Split rank 0's parameter along `dim`, or replicate it if `dim` is None. If it has `parts`
    matrices side by side, each shard gets a piece of each."""
    full = distribute_tensor(parameter.detach(), mesh, [Replicate()]).to_local()
    placement: Placement = Replicate()
    if dim is not None:
        full = shard_of(full, dim, parts, mesh)
        placement = _StridedShard(dim, split_factor=parts) if parts > 1 else Shard(dim)
    sharded = DTensor.from_local(full, mesh, [placement], run_check=False)
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


class Passage(NamedTuple):
    """How activations get into column layers, and out of row layers."""

    into: Callable[[torch.Tensor], torch.Tensor]
    out: Callable[[torch.Tensor], torch.Tensor]


def passage(mesh: DeviceMesh, sequence: SplitSequence | None) -> Passage:
    """With `sequence`, a hook joins the parts of the sequence before the columns' module."""
    if sequence:
        return Passage(lambda x: x, sequence.sum_to_part)
    return Passage(partial(copy_to_shards, mesh=mesh), partial(sum_over_shards, mesh=mesh))


def copy_to_shards(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return x. In backward, sum its gradient over the shards."""
    copied: Any = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    result: torch.Tensor = copied.to_local(grad_placements=[Partial()])
    return result


def sum_over_shards(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Sum x over the shards. In backward, every shard gets the full gradient."""
    partial: Any = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    result: torch.Tensor = partial.redistribute(placements=[Replicate()]).to_local()
    return result
