"""`tp`, and `hybrid` with one stage: one process per shard. torch's DTensor splits the proved
groups of layers, and the rest of the model is replicated.

    forward    [ columns ][ heads of this shard ][ rows ][all-reduce][ replicated layers ] …
    backward   [ replicated layers ][ rows ][ heads of this shard ][ columns ][all-reduce] …

With --sequence-parallel, each shard also processes only its part of the tokens in the replicated
layers of blocks (see `split_tokens`).

All shards process the same samples, compute the same loss, and get the same gradients for
replicated parameters. Only the first shard reports the loss. With multiple replicas, each shard then
sums its gradients over the replicas.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paralab.worker.groups import broadcast_model, group_along, group_of
from paralab.worker.measure.memory import addresses
from paralab.worker.rank_context import AccumulationStep, RankContext, Strategy
from paralab.worker.replica_sum import sum_over_replicas
from paralab.worker.sharding.sharded_layers import mixing_tensors
from paralab.worker.sharding.shards import local
from paralab.worker.sharding.split_layers import (
    align_shards,
    require_agreement,
    running_shards,
    split_layers,
)
from paralab.worker.sharding.split_sequence import SplitSequence


class Tp(Strategy):
    def __init__(self, context: RankContext, model: nn.Module) -> None:
        plan, rank = context.plan, context.rank
        device, split = rank.devices[0], plan.tensor_plan
        assert split is not None
        self.context, self.model = context, model.to(device.torch)
        broadcast_model(model, group_of(plan))

        full = addresses(model.parameters())
        shards = group_along(plan, "shards", rank.rank)
        mesh = DeviceMesh.from_group(shards, plan.device, mesh_dim_names=("shards",))
        self.sequence = None
        if split.sequence:
            begin = context.probe.begin_inside, context.probe.begin_collective
            blocks = split.sequence.kept
            self.sequence = SplitSequence(model, blocks, shards, *begin, "--sequence-parallel")
            context.recomputing = self.sequence.recomputing
        split_layers(context, model, split.kept, mesh, self.sequence)
        context.meter.ignored -= full
        context.meter.ignored |= addresses(map(local, model.parameters()))
        if plan.scaler:
            context.precision.agreed_over = group_of(plan)
        context.note_split.watch(self.model, device.name)

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        align_shards(self.context, self.model)
        with running_shards(self.context):
            loss = self.accumulate(self.model, accumulation_steps)
            if self.sequence:
                self.sequence.sum_gradients()
        require_agreement(self.context, loss)
        sum_over_replicas(self.context, list(self.model.parameters()))
        return torch.zeros_like(loss) if self.context.rank.shard else loss

    def stepping(self) -> AbstractContextManager[None]:
        return mixing_tensors()
