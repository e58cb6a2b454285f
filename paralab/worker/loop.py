"""One rank's training loop, from top to bottom."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from paralab.plan.plan import Plan
from paralab.record.checkpoints import CheckpointPolicy
from paralab.record.status_board import StatusBoard
from paralab.record.writer import EventWriter
from paralab.worker.batches import count_samples, load_batches
from paralab.worker.measure.device_load import LoadSampler
from paralab.worker.measure.notes import note_gradients, note_memory
from paralab.worker.measure.profile import profile_steps
from paralab.worker.optimizer import make_optimizer
from paralab.worker.progress import TrainingProgress
from paralab.worker.rank_context import RankContext, Strategy, set_up_rank
from paralab.worker.strategies.table import make_strategy
from paralab.worker.verify import TrainingTrace, compare, load_example
from paralab.workload.randomness import seed_everything
from paralab.workload.recompute import recompute
from paralab.workload.verify_controls import controlled
from paralab.workload.workload import Workload

MEMORY_EVERY = 10  # number of steps


@dataclass(frozen=True)
class Extras:
    """Files that a run reads and writes besides its events."""

    save_weights: Path | None = None
    save_reference: Path | None = None
    compare_with: Path | None = None
    profile: Path | None = None
    policy: CheckpointPolicy | None = None


def train(
    workload: Workload,
    plan: Plan,
    rank_number: int,
    writer: EventWriter,
    origin: float,
    extras: Extras,
    board: StatusBoard,
) -> bool:
    """Train as rank `rank_number` of `plan`. Return False if the launcher stopped the run early."""
    context, model = set_up_rank(workload, plan, rank_number, writer, origin)
    trace = TrainingTrace.begin(model) if extras.save_reference or extras.compare_with else None
    around: AbstractContextManager[None] = (
        controlled(model, plan.control, load_example(context))
        if trace
        else LoadSampler(context.rank, context.probe)
    )

    with around:
        compiler = None
        if plan.compiled:
            from paralab.worker.compile import BlockCompiler  # importing it is slow

            compiler = BlockCompiler(model, plan.compiled, plan.precision)
        for name in plan.recomputed:
            recompute(model.get_submodule(name), plan.recompute or "", context.watch_recomputed)
        strategy = make_strategy(context, model)
        optimizer = make_optimizer(context.workload, model)
        if plan.zero == 1:
            from paralab.worker.sharding.zero_optimizer import (
                ShardedOptimizer,  # importing it is slow
            )

            optimizer = ShardedOptimizer(context, optimizer)
        progress = TrainingProgress(context, strategy, optimizer, extras.policy, board)
        # From here on, each replica draws its own random numbers for dropout.
        seed_everything((plan.seed + 1 + context.rank.random_stream) % 2**32)
        with profile_steps(extras.profile, rank_number) as profile_step:
            _run_steps(progress, trace, profile_step)
        note_memory(context, strategy, optimizer)
        if compiler:
            compiler.finish(context.probe)

    _write_results(context, strategy, trace, extras)
    return not progress.stopped


def _run_steps(
    progress: TrainingProgress, trace: TrainingTrace | None, profile_step: Callable[[], None]
) -> None:
    """Run all steps in the plan, unless the launcher asks to stop earlier."""
    context, strategy, optimizer = progress.context, progress.strategy, progress.optimizer
    probe, precision, model = context.probe, context.precision, strategy.model
    losses: list[torch.Tensor] = []
    stepped: list[bool] = []  # empty after a step that the GradScaler skips
    optimizer.register_step_post_hook(lambda *_: stepped.append(True))

    for batch, accumulation_steps in load_batches(context, progress.done):
        if not progress.begin_step(batch, accumulation_steps):
            break
        probe.begin_step(batch.step)

        optimizer.zero_grad(set_to_none=True)
        loss = strategy.forward_backward(accumulation_steps)
        if batch.step == 0:
            note_gradients(context, model)
            if trace:
                trace.first_gradients(strategy.gradients(), precision.scaler.get_scale())

        if trace and context.plan.world_size == 1:  # references always run with one rank
            trace.note_gradients(strategy.gradients())

        stepped.clear()
        with probe.span("optimizer", scale=precision.scale_like(loss)):
            with strategy.stepping():
                precision.step(optimizer)
            if stepped and progress.scheduler:
                progress.scheduler.step()
        strategy.finish_step(batch.step)

        counts = context.rank.counts(context.plan.stages)
        samples = count_samples(accumulation_steps) if counts else 0
        probe.end_step(loss, epoch=batch.epoch, samples=samples, skipped=not stepped)
        if batch.step % MEMORY_EVERY == 0:
            note_memory(context, strategy, optimizer)
            context.meter.enabled = False  # counting activations is slow, so count only once
        if trace:
            losses.append(loss)
        profile_step()
        progress.end_step(batch)

    probe.finish()
    progress.finish()
    if trace:
        trace.finish(model, [loss.item() for loss in losses])


def _write_results(
    context: RankContext, strategy: Strategy, trace: TrainingTrace | None, extras: Extras
) -> None:
    """Write what was requested: the reference, the comparison with a reference, or the weights."""
    if trace and extras.save_reference:
        # In fp16, gradients may underflow. A simulation splits the batch, and a contrastive loss has
        # no gradient for a single sample.
        if context.plan.precision != "fp16" and not context.plan.simulation:
            trace.require_gradients()
        trace.save(extras.save_reference)
    if trace and extras.compare_with:
        comparison = compare(trace, TrainingTrace.load(extras.compare_with))
        place = {"stage": context.rank.stage, "shard": context.rank.shard}
        context.probe.emit("verify", **place, **comparison)
    if extras.save_weights:
        weights = strategy.state_dict()  # call this on all ranks, because each may have a shard
        if context.rank.rank == 0:
            torch.save(weights, extras.save_weights)
