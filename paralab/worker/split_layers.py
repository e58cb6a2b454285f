"""Split this rank's layers over the shards, and time the sums over them.

DTensor splits the proved groups of layers. The rest of the model is replicated: all shards process
the same samples, compute the same loss, and get the same gradients for what is not split.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from paralab.worker.groups import group_along, ranks_with
from paralab.worker.probes import runs_on_stream
from paralab.worker.rank_context import RankContext
from paralab.worker.shard_streams import ShardStreams
from paralab.worker.sharded_layers import shard_group, watch_regions
from paralab.workload.hooks import patched
from paralab.workload.tensor_group import TensorGroup


def split_layers(
    context: RankContext,
    model: nn.Module,
    groups: Sequence[TensorGroup],
    mesh: DeviceMesh,
) -> None:
    """Split these groups in place. Between columns and row, each shard draws its own numbers."""
    for group in groups:
        shard_group(model, group, mesh)
    if context.plan.draws:
        device = torch.device(context.rank.devices[0].torch)
        streams = ShardStreams(context.rank.shard or 0, device)
        watch_regions(model, groups, streams.enter, streams.leave)


def timing_sums(context: RankContext) -> AbstractContextManager[Any]:
    """Time the all-reduces in this block that DTensor runs over the shards."""
    plan, rank, probe = context.plan, context.rank, context.probe
    if plan.tensor_plan is None:
        return nullcontext()
    group, all_reduce = group_along(plan, "shards", rank.rank), functional.all_reduce
    where = {"stage": rank.stage, "ranks": ranks_with(plan, "shards", rank.rank)}

    def timed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """DTensor uses the result immediately, so waiting for it here changes nothing."""
        # A backward pass records no graph, unless it repeats a part of the forward pass.
        unit = "activations" if torch.is_grad_enabled() else "gradients"
        more = {"bucket": probe.collectives["all_reduce"], "unit": unit}  # the number in this step
        blocking = not runs_on_stream(tensor, group)
        note = probe.begin_collective(
            "all_reduce", tensor, group, **where, **more, blocking=blocking
        )
        result: torch.Tensor = functional.wait_tensor(all_reduce(tensor, *args, **kwargs))
        note()
        return result

    return patched(functional, all_reduce=timed)
