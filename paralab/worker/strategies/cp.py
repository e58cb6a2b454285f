"""`cp`: one process per shard. In repeated blocks, each process has a part of every sequence.

    forward    [ whole ][ block ][a2a][ attention ][a2a][ block ] … [all-gather][ whole ]
    backward   [ whole ][ block ][a2a][ attention ][a2a][ block ] … [all-gather][ whole ][all-reduce]

All shards process the same samples and compute the same loss. Only the first shard reports it.
"""

from __future__ import annotations

import torch
from torch import nn

from paralab.worker.groups import broadcast_model, group_along, group_of
from paralab.worker.rank_context import AccumulationStep, RankContext, Strategy
from paralab.worker.sharding.shard_streams import ShardStreams
from paralab.worker.sharding.split_layers import align_shards, require_agreement
from paralab.worker.sharding.split_sequence import SplitSequence


class Cp(Strategy):
    def __init__(self, context: RankContext, model: nn.Module) -> None:
        plan, rank, probe = context.plan, context.rank, context.probe
        device = rank.devices[0]
        assert plan.sequence_plan is not None
        assert rank.shard is not None
        self.context, self.model = context, model.to(device.torch)
        broadcast_model(model, group_of(plan))

        blocks = plan.sequence_plan.kept
        begin = probe.begin_inside, probe.begin_collective
        group = group_along(plan, "shards", rank.rank)
        self.split = SplitSequence(model, blocks, group, *begin)
        if plan.draws:
            self.split.streams = ShardStreams(rank.shard, torch.device(device.torch))
        context.recomputing = self.split.recomputing
        context.note_split.watch(self.model, device.name)

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        align_shards(self.context, self.model)
        if self.split.streams:
            self.split.streams.begin_passes()
        with self.split.training():
            loss = self.accumulate(self.model, accumulation_steps)
        require_agreement(self.context, loss)
        return torch.zeros_like(loss) if self.context.rank.shard else loss
