"""Turn a global batch into this rank's weighted micro-batches.

global batch 64 ─► this rank's span ─► accumulation steps ─► micro-batches, each with its share
                                                             of the loss
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paralab.plan.batches import GlobalBatch, Span, global_batches, pieces, replica_span
from paralab.plan.plan import Plan
from paralab.worker.groups import group_of
from paralab.worker.rank_context import AccumulationStep, MicroBatch, RankContext
from paralab.worker.samples import rank_batches
from paralab.workload.batch import map_tensors, num_samples, take, unpack
from paralab.workload.workload import Workload

LoadedBatch = tuple[GlobalBatch, list[AccumulationStep]]


def load_batches(context: RankContext, done: int = 0) -> Iterator[LoadedBatch]:
    """Skip the first `done` global batches. Yield each later batch with this rank's accumulation
    steps, on the rank's first device. A simulation gets the steps of all replicas, in order.

    Prepare one batch ahead, so that the all-reduce of the weights finishes in time.
    """
    plan, clock = context.plan, context.probe.clock
    simulated = plan.simulation and plan.simulation.replicas
    replicas = range(simulated) if simulated else [context.rank.replica]

    def span(replica: int, batch: GlobalBatch) -> Span:
        return replica_span(batch.size, simulated or plan.rank_replicas, replica)

    def stream(replica: int) -> Iterator[Part]:
        batches = global_batches(plan.batch_size, plan.samples, plan.steps, plan.epochs, done)
        own, on_gpu = partial(span, replica), plan.device == "cuda"
        each = rank_batches(context.workload, batches, own, plan.samples, plan.seed, on_gpu)
        return (Part(replica, batch, samples, own(batch)) for batch, samples in each)

    streams = zip(*map(stream, replicas), strict=True)
    ahead: RankBatch | None = None
    while True:
        start = clock.now()  # use CPU time, because the CPU loads the data
        parts = next(streams, None)
        following = RankBatch(context, parts) if parts else None
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


@dataclass(frozen=True)
class Part:
    """One replica's samples from a global batch."""

    replica: int
    batch: GlobalBatch
    samples: Any
    span: Span

    def weighted(self, plan: Plan, workload: Workload) -> list[list[Weighted]]:
        """Return the micro-batches of each accumulation step, with their weights."""
        size = self.span[1] - self.span[0]
        if size:
            accumulate = plan.simulation.accumulate if plan.simulation else plan.accumulate
            cuts = pieces(size, accumulate, plan.micro_batches)
        else:  # an idle rank borrows samples because it must join the collectives
            cuts = [[(0, num_samples(self.samples))]]
        weigh = (workload.weight or num_samples) if size else lambda micro: 0.0
        micro_batches = [[take(self.samples, *cut) for cut in step] for step in cuts]
        return [
            [Weighted(self.replica, micro, float(weigh(micro))) for micro in step]
            for step in micro_batches
        ]


class Weighted(NamedTuple):
    replica: int
    samples: Any
    weight: float


class RankBatch:
    """A rank's samples from one global batch, split into weighted micro-batches."""

    def __init__(self, context: RankContext, parts: Sequence[Part]) -> None:
        self.context, self.batch, plan = context, parts[0].batch, context.plan
        self.weighted = [step for p in parts for step in p.weighted(plan, context.workload)]
        total = sum(sum(micro.weight for micro in step) for step in self.weighted)
        # A replica's stages and shards process the same samples, so count them once.
        counted = total if context.rank.counts(plan.stages) else 0.0
        self.total = torch.tensor(counted, dtype=torch.float64)
        self.sum: dist.Work | None = None
        if context.workload.weight is None:
            self.total.fill_(self.batch.size)
        elif plan.world_size > 1:
            self.sum = dist.all_reduce(self.total, group=group_of(plan), async_op=True)

    def accumulation_steps(self) -> list[AccumulationStep]:
        if self.sum:
            self.sum.wait()
        total = float(self.total) or math.inf  # if the total weight is zero, every share is zero
        return [[self._place(micro, total) for micro in step] for step in self.weighted]

    def _place(self, micro: Weighted, total: float) -> MicroBatch:
        """Move a micro-batch to the rank's first device."""
        context, device = self.context, self.context.rank.devices[0].torch
        moved = map_tensors(lambda t: t.to(device, non_blocking=True), micro.samples)
        split = context.workload.unpack or unpack
        inputs, targets = split(context.precision.cast_batch(moved))
        return MicroBatch(inputs, targets, micro.weight / total, micro.replica)
