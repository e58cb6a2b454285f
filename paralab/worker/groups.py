"""The process groups of a launch. Several trainings share its processes, and some of them use only the first few ranks."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from paralab.plan.plan import Plan

PATIENCE = timedelta(minutes=10)  # how long a rank waits for another one in a collective

_groups: dict[tuple[int, str, int], dist.ProcessGroup] = {}


def make_groups(plans: list[Plan]) -> None:
    """Every group that these plans need. All ranks of the launch must make all of them in the same order, so it is done at once."""
    for plan in plans:
        for stage in range(plan.stages if plan.backend else 0):
            key = (plan.world_size, plan.backend or "", stage)
            if key not in _groups:
                _groups[key] = dist.new_group(range(plan.world_size), PATIENCE, plan.backend)


def group_of(plan: Plan, stage: int = 0) -> dist.ProcessGroup:
    """The plan's ranks, one group per stage: collectives of a group must come in the same order on every rank, and stages finish
    in any."""
    return _groups[plan.world_size, plan.backend or "", stage]
