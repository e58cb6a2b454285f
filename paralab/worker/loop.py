"""The training loop of one rank, from top to bottom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paralab.machine.host import peak_resident_bytes
from paralab.plan.batches import GlobalBatch, pieces, replica_span
from paralab.plan.plan import Plan
from paralab.record.checkpoints import CheckpointPolicy
from paralab.record.writer import EventWriter
from paralab.worker import memory
from paralab.worker.clock import Clock, CudaClock
from paralab.worker.device_load import LoadSampler
from paralab.worker.groups import group_of
from paralab.worker.optimizer import make_optimizer
from paralab.worker.precision import Precision
from paralab.worker.probes import Probe, sampled
from paralab.worker.profile import profiled
from paralab.worker.progress import TrainingProgress
from paralab.worker.random_streams import Streams
from paralab.worker.rank_context import Micro, Pass, RankContext, Strategy
from paralab.worker.samples import rank_batches
from paralab.worker.shards import local, whole
from paralab.worker.status import Pulse
from paralab.worker.strategies.data_parallel import DataParallel
from paralab.worker.strategies.ddp import Ddp
from paralab.worker.strategies.fsdp import Fsdp
from paralab.worker.strategies.hybrid import Hybrid
from paralab.worker.strategies.pipeline_processes import Scheduled, whole_state
from paralab.worker.strategies.pipeline_threads import Staged
from paralab.worker.strategies.single import Single
from paralab.worker.verify import Trace, compare
from paralab.workload.batch import map_tensors, num_samples, take, tensors, unpack
from paralab.workload.proof_controls import controlled, seeded_loss
from paralab.workload.randomness import seed_everything
from paralab.workload.workload import Workload

STRATEGIES: dict[str, Any] = {
    "single": Single,
    "dp": DataParallel,
    "ddp": Ddp,
    "fsdp": Fsdp,
    "mp": Staged,
    "pipeline": Staged,
    "hybrid": Hybrid,
}
MEMORY_EVERY = 10


@dataclass(frozen=True)
class Extras:
    """What a training leaves besides its events."""

    save_weights: Path | None = None
    save_reference: Path | None = None
    compare_with: Path | None = None
    profile: Path | None = None
    keeping: CheckpointPolicy | None = None

    @property
    def traced(self) -> bool:
        return self.save_reference is not None or self.compare_with is not None


def train(
    workload: Workload,
    plan: Plan,
    rank_number: int,
    writer: EventWriter,
    origin: float,
    extras: Extras,
    pulse: Pulse | None = None,
) -> bool:
    """Train `workload` as `plan` says, as rank `rank_number`; False: stopped on the way, because
    the launcher asked for it."""
    rank = plan.ranks[rank_number]
    torch.set_num_threads(plan.threads_per_device)
    if plan.device == "cuda":
        torch.cuda.set_device(rank.devices[0].torch)
    seed_everything(plan.seed)
    precision = Precision(plan)
    model = precision.cast_model(workload.model()).train()
    clock = (
        CudaClock(origin, [d.torch for d in rank.devices])
        if plan.device == "cuda"
        else Clock(origin)
    )
    # Every stage of every micro-batch makes marks, and the host that launches a GPU's kernels feels
    # each of them.
    many_marks = plan.device == "cuda" and len(plan.stage_parts) > 1 and not plan.schedule
    probe = Probe(clock, writer, sampled(plan.num_steps) if many_marks else 1)
    meter = memory.ActivationMeter(model.parameters(), enabled=plan.device == "cpu")
    shower = SplitShower([device.name for device in rank.devices], probe)
    if "random" in plan.control:
        workload = replace(workload, loss=seeded_loss(workload.loss))
    job = RankContext(
        plan, rank, workload, precision, probe, meter, shower, _streams(plan, rank_number)
    )
    trace = Trace.begin(model) if extras.traced else None
    with controlled(model, plan.control, _example(job)) if trace else LoadSampler(rank, probe):
        strategy: Strategy = (Scheduled if plan.schedule else STRATEGIES[plan.strategy])(job, model)
        if plan.strategy in ("single", "ddp", "fsdp"):
            model.register_forward_pre_hook(shower.inside(rank.devices[0].name), with_kwargs=True)
        optimizer = make_optimizer(workload, model)
        course = TrainingProgress(job, strategy, optimizer, extras.keeping, pulse or Pulse())
        # From here on, randomness inside the model (dropout) is the rank's own.
        seed_everything((plan.seed + 1 + rank_number) % 2**32)
        with profiled(extras.profile, rank_number) as profiled_step:
            finished = _steps(course, trace, profiled_step)
        note_memory(job, strategy, optimizer)
    if trace:
        if extras.save_reference:
            trace.save(extras.save_reference)
        if extras.compare_with:
            probe.emit(
                "parity", stage=rank.stage, **compare(trace, Trace.load(extras.compare_with))
            )
    if extras.save_weights:  # all ranks take part where each holds a piece
        held = {name: whole(value) for name, value in model.state_dict().items()}
        weights = whole_state(job, model) if plan.schedule else held
        if rank_number == 0:
            torch.save(weights, extras.save_weights)
    return finished


def _example(job: RankContext) -> Any:
    """The inputs of three samples, where a proof must know how the model's random tensors are laid
    out."""
    if "random" not in job.plan.control:
        return None
    plan, workload = job.plan, job.workload
    batches = rank_batches(
        workload,
        lambda batch: (0, batch.size),
        batch_size=3,
        samples=plan.samples,
        steps=1,
        epochs=None,
        seed=plan.seed,
    )
    _, samples = next(batches)
    return (
        (workload.unpack or unpack)(job.precision.cast_batch(samples))[0]
        if num_samples(samples) == 3
        else None
    )


def _streams(plan: Plan, rank_number: int) -> Streams | None:
    """Where several threads draw from one generator: the virtual devices of a CPU, or replicas that
    share a GPU."""
    names = [device.torch for device in plan.ranks[rank_number].devices]
    threaded = plan.strategy == "dp" or (plan.device == "cpu" and plan.micro_batches > 1)
    if not plan.draws or not threaded or len(names) < 2 or len(set(names)) == len(names):
        return None
    return Streams(len(names), plan.seed + 1 + rank_number, torch.device(names[0]).index)


def _steps(
    course: TrainingProgress, trace: Trace | None, profiled_step: Callable[[], None]
) -> bool:
    """The loop itself: every step of the plan, or those until the launcher asks to stop."""
    job, strategy, optimizer = course.job, course.strategy, course.optimizer
    probe, precision, model = job.probe, job.precision, strategy.model
    stepped: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(True))
    losses: list[torch.Tensor] = []
    for batch, passes in passes_of(job, course.done):
        if not course.begins(batch, passes):
            break
        probe.begin_step(batch.step)
        optimizer.zero_grad(set_to_none=True)
        loss = strategy.forward_backward(passes)
        if trace and batch.step == 0:
            trace.first_gradients(model, scale=precision.scaler.get_scale())
        if batch.step == 0:
            note_gradients(job, model)
        stepped.clear()
        with probe.span("optimizer", scale=precision.scale_like(loss)):
            precision.step(optimizer)
            course.step_scheduler(bool(stepped))
        samples = num_in(passes) if job.rank.counts(job.plan.stages) else 0
        probe.end_step(loss, epoch=batch.epoch, samples=samples, skipped=not stepped)
        if batch.step % MEMORY_EVERY == 0:
            note_memory(job, strategy, optimizer)
            job.meter.enabled = False  # counted once; it costs time
        if trace:
            losses.append(loss)
        profiled_step()
        course.ends(batch)
    probe.finish()
    course.finish()
    if trace:
        trace.finish(model, [loss.item() for loss in losses])
    return not course.stopped


@torch.no_grad()
def note_gradients(job: RankContext, model: nn.Module) -> None:
    """The first step's gradients, before a GradScaler takes its scale out: how many are zero
    (underflow) or not finite (overflow).

    It makes the host wait for the device, once, in a step that no timing counts."""
    gradients = [
        _stored(local(parameter.grad))
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    total = sum(gradient.numel() for gradient in gradients)
    zeros = sum(int((gradient == 0).sum()) for gradient in gradients)
    not_finite = sum(int((~gradient.isfinite()).sum()) for gradient in gradients)
    counts = torch.tensor([total, zeros, not_finite])
    if job.plan.strategy == "fsdp":  # every rank has its own part of them
        dist.all_reduce(counts, group=group_of(job.plan))
    job.probe.emit(
        "gradients",
        step=0,
        **dict(zip(("total", "zeros", "not_finite"), counts.tolist(), strict=True)),
        scale=job.precision.scaler.get_scale() if job.plan.scaler else None,
    )


def _stored(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers that a gradient holds: of a sparse one, those that are not left out."""
    return gradient if gradient.layout == torch.strided else gradient.coalesce().values()


def num_in(passes: list[Pass]) -> int:
    """Samples of these passes that count."""
    return sum(num_samples(micro.inputs) for micros in passes for micro in micros if micro.share)


def passes_of(job: RankContext, done: int) -> Iterator[tuple[GlobalBatch, list[Pass]]]:
    """This rank's passes of every global batch behind the first `done`, on its first device, each
    micro-batch with its share of the loss.

    One step is prepared ahead, so that the small sum of weights over ranks, where there is one, is
    done before it is needed.
    """
    plan = job.plan
    replica, replicas = job.rank.replica, plan.rank_replicas
    stream = rank_batches(
        job.workload,
        lambda batch: replica_span(batch.size, replicas, replica),
        batch_size=plan.batch_size,
        samples=plan.samples,
        steps=plan.steps,
        epochs=plan.epochs,
        seed=plan.seed,
        done=done,
        pin_memory=plan.device == "cuda",
    )
    ahead: Prepared | None = None
    while True:
        start = job.probe.clock.now()  # host time: loading is the host's work
        item = next(stream, None)
        following = (
            Prepared(job, *item, replica_span(item[0].size, replicas, replica)) if item else None
        )
        job.probe.note("data", start, job.probe.clock.now())
        if ahead:
            yield ahead.batch, ahead.passes()
        if not following:
            return
        ahead = following


class Prepared:
    """A rank's samples of one global batch, cut into weighted micro-batches."""

    def __init__(
        self, job: RankContext, batch: GlobalBatch, samples: Any, span: tuple[int, int]
    ) -> None:
        self.job, self.batch, plan = job, batch, job.plan
        held = span[1] - span[0]
        cuts = (
            pieces(held, plan.accumulate, plan.micro_batches)
            if held
            else [[(0, num_samples(samples))]]
        )
        self.parts = [[take(samples, *cut) for cut in micros] for micros in cuts]
        weigh = job.workload.weight or num_samples
        # An idle rank was given samples so that it takes part in the collectives: it weighs
        # nothing.
        self.weights = [
            [float(weigh(part)) if held else 0.0 for part in micros] for micros in self.parts
        ]
        self.total = torch.tensor(sum(map(sum, self.weights)), dtype=torch.float64)
        if not job.rank.counts(
            plan.stages
        ):  # the stages of a replica hold the same samples: they count once
            self.total.zero_()
        self.sum: dist.Work | None = None
        if job.workload.weight is None:
            self.total.fill_(batch.size)
        elif plan.world_size > 1:
            self.sum = dist.all_reduce(self.total, group=group_of(plan), async_op=True)

    def passes(self) -> list[Pass]:
        if self.sum:
            self.sum.wait()
        total = float(self.total)
        job, device = self.job, self.job.rank.devices[0].torch
        split = job.workload.unpack or unpack

        def micro(part: Any, weight: float) -> Micro:
            inputs, targets = split(
                job.precision.cast_batch(
                    map_tensors(lambda t: t.to(device, non_blocking=True), part)
                )
            )
            return Micro(inputs, targets, weight / total if total else 0.0)

        return [
            [micro(part, weight) for part, weight in zip(*both, strict=True)]
            for both in zip(self.parts, self.weights, strict=True)
        ]


class SplitShower:
    """Notes what arrives inside the model on each device (practical 5's line): in the first step,
    and when it changes."""

    def __init__(self, job_devices: list[str], probe: Probe) -> None:
        self.probe = probe
        self.expected = Counter(job_devices)  # several replicas on one GPU: several lines
        self.seen: dict[str, list[list[int]]] = {}

    def __call__(self, device: str, physical: torch.device, shape: torch.Size) -> None:
        seen = self.seen.setdefault(device, [])
        if len(seen) < self.expected[device] or list(shape) not in seen:
            seen.append(list(shape))
            self.probe.emit(
                "split",
                step=self.probe.step,
                device=device,
                physical=str(physical),
                shape=list(shape),
            )

    def inside(self, device: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = next(tensors((args, kwargs)))
            self(device, x.device, x.shape)

        return hook


def note_memory(job: RankContext, strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
    """One `memory` event per device of this rank."""
    everything = list(strategy.model.parameters())
    staged: Any = getattr(strategy, "staged", strategy)
    names = [device.name for device in job.rank.devices]
    for number, device in enumerate({d.name: d for d in job.rank.devices}.values()):
        held = everything
        if job.plan.stage_parts:
            held = [
                p
                for stage, name in enumerate(names)
                if name == device.name
                for p in staged.stage_parameters(stage)
            ]
        found = memory.parts(held, optimizer, job.meter.peak.get(device.name))
        if (
            job.plan.strategy == "dp" and number
        ):  # a replica: copies of the parameters and gradients, no optimizer
            found["optimizer"] = 0
        if isinstance(strategy, Fsdp):
            found |= strategy.held_for_a_while()
        if job.plan.device == "cuda":
            how, total = "allocator", torch.cuda.max_memory_allocated(device.torch)
        else:
            how, total = "counted", sum(value or 0 for value in found.values())
        process = peak_resident_bytes()
        job.probe.emit(
            "memory", device=device.name, bytes=total, how=how, **found, process_bytes=process
        )
