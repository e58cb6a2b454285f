"""Sum gradients over the replicas of a stage or shard, without DDP, in flat buckets."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from paralab.worker.groups import group_along, ranks_with
from paralab.worker.rank_context import RankContext
from paralab.worker.shards import local

BUCKET_MB = 25.0  # DDP's default


@torch.no_grad()
def sum_over_replicas(context: RankContext, own: list[nn.Parameter]) -> None:
    """Sum the gradients of this rank's parameters, or of its shards of them."""
    plan, rank = context.plan, context.rank
    if plan.rank_replicas < 2:
        return
    group = group_along(plan, "replicas", rank.rank)
    limit = (plan.bucket_mb or BUCKET_MB) * 2**20
    for number, parameters in enumerate(buckets(own, limit)):
        # A parameter may have a gradient on only some replicas, but all replicas must send the
        # same number of bytes. So append one flag per parameter. A parameter that no replica uses
        # gets no gradient, because weight decay would change it.
        flags = [parameter.grad is not None for parameter in parameters]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        shards = [local(gradient) for gradient in gradients]
        flat = torch.cat([*(s.flatten() for s in shards), shards[0].new_tensor(flags)])

        where = {
            "bucket": number,
            "stage": rank.stage,
            "ranks": ranks_with(plan, "replicas", rank.rank),
        }
        note = context.probe.begin_collective("all_reduce", flat, group, **where)
        dist.all_reduce(flat, group=group)
        note()

        *sums, used = flat.split([*(s.numel() for s in shards), len(shards)])
        for parameter, gradient, shard, total, is_used in zip(
            parameters, gradients, shards, sums, used.tolist(), strict=True
        ):
            shard.copy_(total.view_as(shard))
            parameter.grad = gradient if is_used else None


def buckets(parameters: list[nn.Parameter], limit_bytes: float) -> list[list[nn.Parameter]]:
    """Group parameters by dtype into buckets. A parameter over the limit gets its own."""
    groups: list[list[nn.Parameter]] = []
    room, dtype = 0.0, None
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        size = local(parameter).nbytes
        if size > room or parameter.dtype != dtype:
            groups.append([])
            room, dtype = limit_bytes, parameter.dtype
        groups[-1].append(parameter)
        room -= size
    return groups
