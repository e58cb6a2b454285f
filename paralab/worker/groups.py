"""Process groups. All runs of a launch share its processes, and some use only the first ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from paralab.plan.grid import AXES, Axis, ranks_along
from paralab.plan.plan import Plan
from paralab.worker.sharding.shards import is_split, local

PATIENCE = timedelta(minutes=10)  # how long a rank waits for another rank in a collective

# The purpose of each group:
#   all         all ranks; one group per stage (`number`), because collectives in a group must run
#               in the same order on all ranks, but stages finish in any order
#   replicas, stages, shards   the ranks that differ only along this axis of the grid
#   parts       one of fsdp's shard groups, whose ranks together have all parts of a parameter
#   copies      the ranks that have the same part, one in each shard group
#   order       fsdp ranks (or those of one stage) and ep ranks compare their next collectives in this
#               group before they run them
#   checkpoint  writes checkpoints while training uses the other groups
Purpose = Literal["all", "replicas", "stages", "shards", "parts", "copies", "order", "checkpoint"]
Key = tuple[tuple[int, ...], str, Purpose, int]  # (ranks, backend, purpose, number)

_groups: dict[Key, dist.ProcessGroup] = {}


def make_groups(plan: Plan, saves: bool) -> None:
    """Create this plan's groups. All ranks in a launch must create all groups in the same order."""
    keys = [_key(plan, "all", stage) for stage in range(1 if plan.schedule else plan.stages)]
    if plan.shards_parameters or plan.expert_plan:
        keys += _order_keys(plan)
    if plan.shard_groups > 1:
        keys += [_key(plan, "parts", group) for group in range(plan.shard_groups)]
        keys += [_key(plan, "copies", shard) for shard in range(plan.shards_per_parameter)]
    if has_axes(plan):
        keys += [_axis_key(plan, axis, ranks) for axis in AXES for ranks in _along(plan, axis)]
    if plan.backend == "local":
        import paralab.collectives  # noqa: F401  registers the backend
    for key in keys if plan.backend else []:
        if key not in _groups:
            _groups[key] = dist.new_group(list(key[0]), PATIENCE, key[1])

    key = _key(plan, "checkpoint")
    if saves and key not in _groups:
        _groups[key] = dist.new_group(list(key[0]), backend="gloo")


def _key(plan: Plan, purpose: Purpose, number: int = 0) -> Key:
    ranks = [
        rank.rank
        for rank in plan.ranks
        if not (purpose == "parts" and rank.rank // plan.shards_per_parameter != number)
        and not (purpose == "copies" and rank.rank % plan.shards_per_parameter != number)
    ]
    backend = "gloo" if purpose == "checkpoint" else plan.backend or ""
    return tuple(ranks), backend, purpose, number


def group_of(plan: Plan, purpose: Purpose = "all", number: int = 0) -> dist.ProcessGroup:
    return _groups[_key(plan, purpose, number)]


def _along(plan: Plan, axis: Axis) -> list[tuple[int, ...]]:
    return list(ranks_along(axis, [rank.cell for rank in plan.ranks]))


def _axis_key(plan: Plan, axis: Axis, ranks: tuple[int, ...]) -> Key:
    return ranks, plan.backend or "", axis, 0


def ranks_with(plan: Plan, axis: Axis, rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from this rank only along an axis of the grid."""
    return next(ranks for ranks in _along(plan, axis) if rank in ranks)


def group_along(plan: Plan, axis: Axis, rank: int) -> dist.ProcessGroup:
    """Return the group of the ranks that differ from this rank only along an axis of the grid."""
    return _groups[_axis_key(plan, axis, ranks_with(plan, axis, rank))]


def has_axes(plan: Plan) -> bool:
    """Return whether there is a group for each axis of the grid."""
    return bool(plan.schedule or plan.tensor_plan or plan.sequence_plan)


def replica_group(plan: Plan, rank: int) -> dist.ProcessGroup:
    """Return the group of the ranks that have the same part of the model in other replicas."""
    return group_along(plan, "replicas", rank) if has_axes(plan) else group_of(plan)


def whole_model_groups(plan: Plan, rank: int) -> list[dist.ProcessGroup]:
    """Return the groups over which this rank's parameters are divided."""
    if plan.shard_groups > 1:
        return [group_of(plan, "parts", rank // plan.shards_per_parameter)]
    divided = plan.shards_parameters or plan.expert_plan
    groups = [replica_group(plan, rank)] if divided else []
    return groups + ([group_along(plan, "shards", rank)] if has_axes(plan) else [])


def _order_keys(plan: Plan) -> list[Key]:
    """Return the groups whose ranks run the same collectives: one of all ranks, or one per
    stage."""
    stages = {rank.stage for rank in plan.ranks}
    ranks = ([r.rank for r in plan.ranks if r.stage == stage] for stage in stages)
    return [(tuple(each), "gloo", "order", 0) for each in ranks]


def order_group(plan: Plan, rank: int) -> dist.ProcessGroup:
    return next(_groups[key] for key in _order_keys(plan) if rank in key[0])


def broadcast_model(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Copy the first rank's parameters and buffers to all ranks, as DDP does, except for tensors
    that are already split. Otherwise, ranks with different initial values would mix two models."""
    for tensor in [*model.parameters(), *model.buffers()]:
        # broadcast cannot write to an expanded buffer
        if tensor.is_contiguous() and not tensor.is_meta and not is_split(tensor):
            # Send bytes, because gloo does not support all dtypes.
            sent = local(tensor).detach().view(-1).view(torch.uint8)
            dist.broadcast(sent, dist.get_global_rank(group, 0), group)


def checkpoint_group(plan: Plan) -> dist.ProcessGroup | None:
    """Return the group that writes checkpoints, or None in a single process."""
    return _groups.get(_key(plan, "checkpoint"))
