"""`tp`: one process per shard. torch's DTensor splits the proved groups of layers, and the rest of
the model is replicated.

    forward    [ columns ][ heads of this shard ][ rows ][all-reduce][ replicated layers ] …
    backward   [ replicated layers ][ rows ][ heads of this shard ][ columns ][all-reduce] …

All shards process the same samples, compute the same loss, and get the same gradients for
everything that is not split. Only the first shard reports the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from paralab.worker.groups import broadcast_model, group_of
from paralab.worker.memory import addresses
from paralab.worker.probes import runs_on_stream
from paralab.worker.rank_context import AccumulationStep, RankContext, Strategy
from paralab.worker.shard_streams import ShardStreams
from paralab.worker.sharded_layers import mixing_tensors, shard_group, watch_regions
from paralab.worker.shards import local
from paralab.workload.hooks import patched


class Tp(Strategy):
    def __init__(self, context: RankContext, model: nn.Module) -> None:
        plan, rank = context.plan, context.rank
        device, split = rank.devices[0], plan.tensor_plan
        assert split is not None
        assert rank.shard is not None
        self.context, self.model = context, model.to(device.torch)
        self.group = group_of(plan)
        broadcast_model(model, self.group)

        full = addresses(model.parameters())
        mesh = DeviceMesh.from_group(self.group, plan.device)
        for group in split.kept:
            shard_group(model, group, mesh)
        context.meter.ignored -= full
        context.meter.ignored |= addresses(map(local, model.parameters()))
        if plan.draws:
            streams = ShardStreams(rank.shard, torch.device(device.torch))
            watch_regions(model, split.kept, streams.enter, streams.leave)
        if plan.scaler:
            context.precision.agreed_over = self.group
        context.note_split.watch(self.model, device.name)

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        with patched(functional, all_reduce=self._timed(functional.all_reduce)):
            loss = self.accumulate(self.model, accumulation_steps)
        return torch.zeros_like(loss) if self.context.rank.shard else loss

    def _timed(self, all_reduce: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """DTensor calls this function to sum over the shards. It uses the result immediately, so
        waiting for it here changes nothing."""

        def timed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            probe = self.context.probe
            number = probe.collectives["all_reduce"]  # in this step
            where: dict[str, Any] = {
                "bucket": number,
                "blocking": not runs_on_stream(tensor, self.group),
            }
            # A backward pass records no graph, unless it repeats a part of the forward pass.
            where["unit"] = "activations" if torch.is_grad_enabled() else "gradients"
            note = probe.begin_collective("all_reduce", tensor, self.group, **where)
            result: torch.Tensor = functional.wait_tensor(all_reduce(tensor, *args, **kwargs))
            note()
            return result

        return timed

    def stepping(self) -> AbstractContextManager[None]:
        return mixing_tensors()
