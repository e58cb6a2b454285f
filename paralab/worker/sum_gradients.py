"""Sum gradients over ranks in flat buckets, after the last backward pass of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from paralab.worker.sharding.shards import local

BUCKET_MB = 25.0  # DDP's default
# Called with a collective's kind, tensor, and group. Returns a function to call at its end.
Begin = Callable[..., Callable[[], None]]


@torch.no_grad()
def sum_gradients(
    parameters: Iterable[nn.Parameter],
    group: dist.ProcessGroup | None,
    bucket_mb: float | None,
    begin: Begin,
) -> None:
    """Sum the gradients, or this rank's shards of them. All ranks must pass the same parameters."""
    for number, bucket in enumerate(_buckets(parameters, (bucket_mb or BUCKET_MB) * 2**20)):
        # A parameter may have a gradient on only some ranks, but all ranks must send the same
        # number of bytes. So send zeros and one flag per parameter. A parameter that no rank uses
        # must not get a gradient, because weight decay would then change the parameter.
        flags = [parameter.grad is not None for parameter in bucket]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        shards = [local(gradient) for gradient in gradients]
        flat = torch.cat([*(s.flatten() for s in shards), shards[0].new_tensor(flags)])

        note = begin("all_reduce", flat, group, bucket=number)
        dist.all_reduce(flat, group=group)
        note()

        *sums, used = flat.split([*(s.numel() for s in shards), len(shards)])
        for shard, total in zip(shards, sums, strict=True):
            shard.copy_(total.view_as(shard))
        for parameter, gradient, is_used in zip(bucket, gradients, used.tolist(), strict=True):
            parameter.grad = gradient if is_used else None


def _buckets(parameters: Iterable[nn.Parameter], limit_bytes: float) -> list[list[nn.Parameter]]:
    """Group parameters by dtype into buckets. A parameter over the limit gets its own bucket."""
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
