"""Turn a global batch into this rank's weighted micro-batches.

global batch 64 ─► this rank's span ─► accumulation steps ─► micro-batches, each with its share
                                                             of the loss
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from paralab.plan.batches import GlobalBatch, Span, global_batches, pieces, replica_span
from paralab.worker.groups import group_of
from paralab.worker.rank_context import AccumulationStep, MicroBatch, RankContext
from paralab.worker.samples import rank_batches
from paralab.workload.batch import map_tensors, num_samples, take, unpack

LoadedBatch = tuple[GlobalBatch, list[AccumulationStep]]


def load_batches(context: RankContext, done: int = 0) -> Iterator[LoadedBatch]:
    """Skip the first `done` global batches. Yield each of the others with this rank's accumulation
    steps, on the rank's first device.

    Prepare one batch ahead, so that a sum of all ranks' weights is ready in time.
    """
    plan, clock = context.plan, context.probe.clock

    def span(batch: GlobalBatch) -> Span:
        return replica_span(batch.size, plan.rank_replicas, context.rank.replica)

    batches = global_batches(plan.batch_size, plan.samples, plan.steps, plan.epochs, done)
    on_gpu = plan.device == "cuda"
    stream = rank_batches(context.workload, batches, span, plan.samples, plan.seed, on_gpu)
    ahead: RankBatch | None = None
    while True:
        start = clock.now()  # CPU time: the CPU loads the data
        item = next(stream, None)
        following = RankBatch(context, *item, span(item[0])) if item else None
        context.probe.note("data", start, clock.now())
        if ahead:
            yield ahead.batch, ahead.accumulation_steps()
        if not following:
            return
        ahead = following


def count_samples(accumulation_steps: list[AccumulationStep]) -> int:
    """Count the samples that contribute to the loss."""
    micros = (micro for step in accumulation_steps for micro in step)
    return sum(num_samples(micro.inputs) for micro in micros if micro.share)


class RankBatch:
    """A rank's samples from one global batch, split into weighted micro-batches."""

    def __init__(self, context: RankContext, batch: GlobalBatch, samples: Any, span: Span) -> None:
        self.context, self.batch, plan = context, batch, context.plan
        size = span[1] - span[0]
        if size:
            cuts = pieces(size, plan.accumulate, plan.micro_batches)
        else:  # an idle rank borrows samples because it must join the collectives
            cuts = [[(0, num_samples(samples))]]
        micro_batches = [[take(samples, *cut) for cut in step] for step in cuts]

        weigh = (context.workload.weight or num_samples) if size else lambda micro: 0.0
        self.weighted = [[(micro, float(weigh(micro))) for micro in step] for step in micro_batches]
        total = sum(sum(weight for _, weight in step) for step in self.weighted)
        # A replica's stages share its samples: count them once.
        counted = total if context.rank.counts(plan.stages) else 0.0
        self.total = torch.tensor(counted, dtype=torch.float64)
        self.sum: dist.Work | None = None
        if context.workload.weight is None:
            self.total.fill_(batch.size)
        elif plan.world_size > 1:
            self.sum = dist.all_reduce(self.total, group=group_of(plan), async_op=True)

    def accumulation_steps(self) -> list[AccumulationStep]:
        if self.sum:
            self.sum.wait()
        total = float(self.total) or math.inf  # if the total weight is zero, every share is zero
        return [[self._place(*micro, total) for micro in step] for step in self.weighted]

    def _place(self, samples: Any, weight: float, total: float) -> MicroBatch:
        """Move a micro-batch to the rank's first device."""
        context, device = self.context, self.context.rank.devices[0].torch
        moved = map_tensors(lambda t: t.to(device, non_blocking=True), samples)
        split = context.workload.unpack or unpack
        return MicroBatch(*split(context.precision.cast_batch(moved)), weight / total)
