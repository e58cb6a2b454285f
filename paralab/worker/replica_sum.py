"""Sum gradients over the replicas of a stage or shard, without DDP."""

from __future__ import annotations

from functools import partial

from torch import nn

from paralab.worker.groups import group_along, ranks_with
from paralab.worker.rank_context import RankContext
from paralab.worker.sum_gradients import sum_gradients


def sum_over_replicas(context: RankContext, own: list[nn.Parameter]) -> None:
    """Sum the gradients of this rank's parameters or shards."""
    plan, rank = context.plan, context.rank
    if plan.rank_replicas < 2:
        return
    together = ranks_with(plan, "replicas", rank.rank)
    begin = partial(context.probe.begin_collective, stage=rank.stage, ranks=together)
    sum_gradients(own, group_along(plan, "replicas", rank.rank), plan.bucket_mb, begin)
