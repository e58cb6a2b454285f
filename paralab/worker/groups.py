"""Process groups for one launch. Several runs share its processes, and some of them use only the
first few ranks."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paralab.plan.plan import Plan

PATIENCE = timedelta(minutes=10)  # how long a rank waits for another rank in a collective

Key = tuple[tuple[int, ...], str, int]  # (ranks, backend, number among groups with these ranks)

_groups: dict[Key, dist.ProcessGroup] = {}


def make_groups(plans: list[Plan]) -> None:
    """Make all groups that these plans need. All ranks in a launch must make all groups in the same
    order."""
    for plan in plans:
        for key in _keys(plan) if plan.backend else []:
            if key not in _groups:
                _groups[key] = dist.new_group(list(key[0]), PATIENCE, key[1])


def make_checkpoint_group(plan: Plan) -> None:
    """Make the group that writes checkpoints while training uses the others. All ranks in a launch
    must call this in the same order."""
    key = _checkpoint(plan)
    if dist.is_initialized() and key not in _groups:
        _groups[key] = dist.new_group(list(key[0]), backend="gloo")


def _keys(plan: Plan) -> list[Key]:
    if plan.strategy == "fsdp":
        return [_all_ranks(plan, 0), _checking(plan)]
    if not plan.schedule:
        return [_all_ranks(plan, stage) for stage in range(plan.stages)]
    pipelines = [_pipeline(plan, replica) for replica in range(plan.rank_replicas)]
    return [_all_ranks(plan, 0), *pipelines, *(_stage(plan, stage) for stage in range(plan.stages))]


def _all_ranks(plan: Plan, stage: int) -> Key:
    return tuple(range(plan.world_size)), plan.backend or "", stage


def _pipeline(plan: Plan, replica: int) -> Key:
    # Number 1: messages between stages must not mix with collectives over all ranks, which may be
    # the same ranks.
    return tuple(rank.rank for rank in plan.ranks if rank.replica == replica), plan.backend or "", 1


def _stage(plan: Plan, stage: int) -> Key:
    return tuple(rank.rank for rank in plan.ranks if rank.stage == stage), plan.backend or "", 2


def _checking(plan: Plan) -> Key:
    return tuple(range(plan.world_size)), "gloo", -1


def _checkpoint(plan: Plan) -> Key:
    return tuple(range(plan.world_size)), "gloo", -2


def checkpoint_group(plan: Plan) -> dist.ProcessGroup | None:
    """The group that writes checkpoints, or None in a single process."""
    return _groups.get(_checkpoint(plan))


def checking_group(plan: Plan) -> dist.ProcessGroup:
    """The group in which fsdp ranks compare their next collectives. It does not run them."""
    return _groups[_checking(plan)]


def group_of(plan: Plan, stage: int = 0) -> dist.ProcessGroup:
    """All ranks in the plan, one group per stage. Collectives in a group must run in the same order
    on all ranks, but stages finish in any order."""
    return _groups[_all_ranks(plan, stage)]


def pipeline_group(plan: Plan, replica: int) -> dist.ProcessGroup:
    """The stages of one replica, with one process per stage."""
    return _groups[_pipeline(plan, replica)]


def mesh(plan: Plan, replica: int, stage: int) -> DeviceMesh:
    """Return the ranks of several pipelines as a mesh, seen from this replica and stage.
    Micro-batches travel along "stage", and gradients are summed along "replica".

        replica 0    rank 0  rank 1     2 replicas with 2 stages each
        replica 1    rank 2  rank 3
    """
    ranks = [
        [rank.rank for rank in plan.ranks if rank.replica == number]
        for number in range(plan.rank_replicas)
    ]
    groups = [_groups[_stage(plan, stage)], pipeline_group(plan, replica)]
    return DeviceMesh.from_group(
        groups, plan.device, mesh=ranks, mesh_dim_names=("replica", "stage")
    )
