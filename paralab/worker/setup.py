"""Set up everything that a rank needs before its first step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paralab.plan.batches import GlobalBatch
from paralab.plan.plan import Plan
from paralab.record.checkpoints import CheckpointPolicy
from paralab.record.writer import EventWriter
from paralab.worker.clock import Clock
from paralab.worker.memory import ActivationMeter
from paralab.worker.precision import Precision
from paralab.worker.probes import Probe, SplitNotes, sampled
from paralab.worker.random_streams import RandomStreams
from paralab.worker.rank_context import RankContext
from paralab.worker.samples import rank_batches
from paralab.workload.batch import unpack
from paralab.workload.randomness import seed_everything
from paralab.workload.sample_draws import seeded_loss
from paralab.workload.workload import Workload


@dataclass(frozen=True)
class Extras:
    """Files that a run reads and writes besides its events."""

    save_weights: Path | None = None
    save_reference: Path | None = None
    compare_with: Path | None = None
    profile: Path | None = None
    policy: CheckpointPolicy | None = None


def set_up_rank(
    workload: Workload, plan: Plan, rank_number: int, writer: EventWriter, origin: float
) -> tuple[RankContext, nn.Module]:
    """Build this rank's model and context. All ranks use the same seed, so their models match."""
    rank = plan.ranks[rank_number]
    devices = [device.torch for device in rank.devices]
    on_gpu = plan.device == "cuda"
    torch.set_num_threads(plan.threads_per_device)
    if on_gpu:
        torch.cuda.set_device(devices[0])

    seed_everything(plan.seed)
    precision = Precision(plan)
    model = precision.cast_model(workload.model()).train()
    if "random" in plan.control:
        workload = replace(workload, loss=seeded_loss(workload.loss))

    # Each stage records marks for each micro-batch, and each mark delays the CPU thread that
    # launches GPU kernels.
    many_marks = on_gpu and len(plan.stage_parts) > 1 and not plan.schedule
    clock = Clock(origin, devices if on_gpu else ())
    probe = Probe(clock, writer, sampled(plan.num_steps) if many_marks else 1)
    context = RankContext(
        plan,
        rank,
        workload,
        precision,
        probe,
        ActivationMeter(model.parameters(), enabled=plan.device == "cpu"),
        SplitNotes([device.name for device in rank.devices], probe),
        _make_streams(plan, rank_number),
    )
    return context, model


def _make_streams(plan: Plan, rank_number: int) -> RandomStreams | None:
    """Create random streams if several virtual devices or replicas share a generator."""
    names = [device.torch for device in plan.ranks[rank_number].devices]
    threaded = plan.strategy == "dp" or (plan.device == "cpu" and plan.micro_batches > 1)
    shared = len(set(names)) < len(names)
    if not plan.draws or not threaded or not shared:
        return None
    return RandomStreams(len(names), plan.seed + 1 + rank_number, torch.device(names[0]).index)


def load_example(context: RankContext) -> Any:
    """Load the inputs of three samples, if a verification needs them to find the layout of random
    tensors. Otherwise, or if the data has fewer samples, return None."""
    if "random" not in context.plan.control:
        return None
    plan, workload = context.plan, context.workload
    if plan.samples is not None and plan.samples < 3:
        return None
    three = [GlobalBatch(step=0, epoch=0, first=0, size=3)]
    _, samples = next(rank_batches(workload, three, samples=plan.samples, seed=plan.seed))
    inputs, _ = (workload.unpack or unpack)(context.precision.cast_batch(samples))
    return inputs
