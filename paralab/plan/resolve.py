"""Turn a request into a plan for a machine and a workload, with a reason per automatic choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paralab.errors import UsageError
from paralab.machine.host import Machine
from paralab.machine.precision import Probe
from paralab.plan.axes import Axis, describe_axes
from paralab.plan.backend import (
    choose_backend,
    choose_bucket,
    choose_mps,
    choose_staging,
    nccl_environment,
)
from paralab.plan.batch_plan import BatchPlan, arithmetic, plan_batch
from paralab.plan.batches import num_steps
from paralab.plan.check import check
from paralab.plan.check_model import check_model
from paralab.plan.compile import choose_compiled
from paralab.plan.expert_plan import remark_on_experts, require_experts
from paralab.plan.grid import Place
from paralab.plan.layout import (
    Layout,
    choose_device,
    count_launched,
    count_threads,
    lay_out,
    plan_ranks,
)
from paralab.plan.lossy import Lossy, choose_lossy, describe_loss
from paralab.plan.plan import Plan, RankPlan, Reasons, Stage
from paralab.plan.precision import choose_precision
from paralab.plan.recompute import choose_recomputed
from paralab.plan.remarks import (
    differences_of,
    remark_on_mps,
    remark_on_samples,
    remarks_on,
)
from paralab.plan.request import (
    BUCKETED,
    Request,
    has_process_per_cell,
    shards_stages,
    splits_layers,
    with_schedule,
)
from paralab.plan.schedules import PARTS_PER_RANK, ideal_bubble
from paralab.plan.sequence_plan import remark_on_sequence, require_blocks
from paralab.plan.sharding import choose_zero, count_shard_groups, shard_units
from paralab.plan.stage_groups import keep_together
from paralab.plan.stages import cut_into_stages
from paralab.plan.tensor_plan import remark_on, require_groups
from paralab.units import plural
from paralab.workload.expert_plan import ExpertPlan
from paralab.workload.sequence_plan import SequencePlan
from paralab.workload.summary import Summary
from paralab.workload.tensor_group import TensorPlan

DEFAULT_STEPS = 20


@dataclass(frozen=True)
class _Links:
    """Fields of a plan: how the ranks exchange tensors."""

    backend: str | None
    mps: bool
    bucket_mb: float | None
    staging_bytes: int
    environment: dict[str, str]


@dataclass(frozen=True)
class _Parts:
    """Fields of a plan: how the model is divided among the ranks."""

    chunks: int
    zero: int | None
    stage_parts: tuple[Stage, ...]
    tensor_plan: TensorPlan | None
    sequence_plan: SequencePlan | None
    expert_plan: ExpertPlan | None


def resolve(
    request: Request,
    machine: Machine,
    summary: Summary,
    probe: Callable[[str], Probe],
    threads_asked: int | None = None,
    places: Sequence[Place] = (),
    cuts: Sequence[str] = (),
) -> Plan:
    """Return the complete plan, or raise a UsageError that says what to write instead.

    places   where the ranks are, if another launcher started them
    cuts     where the stages begin in the checkpoint that the run resumes from
    """
    check(request)
    check_model(request, machine, summary)

    given_schedule = request.schedule
    request, reasons = with_schedule(count_launched(request, places)), Reasons()
    device = choose_device(request, machine, reasons)
    batch = plan_batch(request, summary, reasons)
    precision = choose_precision(request, machine, device, probe, reasons)
    layout = lay_out(request, batch, machine, device, places)
    ranks = plan_ranks(request, batch, layout)
    threads = count_threads(request, machine, layout, threads_asked, reasons)
    samples, steps = _choose_length(request, summary, reasons)
    links = _link(request, machine, layout, summary, probe, reasons)
    find_unused = _choose_find_unused(request, summary, reasons)
    parts = _divide(request, batch, summary, given_schedule, cuts, reasons)
    lossy = choose_lossy(request, reasons)
    shard_groups = count_shard_groups(request, batch.replicas, reasons)

    return Plan(
        strategy=request.strategy,
        workload=request.workload,
        **vars(batch),
        **vars(lossy),
        **vars(parts),
        **vars(precision)
        | vars(links)
        | {"environment": precision.environment | links.environment},
        bucket_view=bool(request.bucket_view),
        static_graph=bool(request.static_graph),
        sync_every_pass=bool(request.sync_every_pass),
        find_unused=find_unused,
        steps=steps,
        epochs=request.epochs,
        samples=samples,
        num_steps=num_steps(batch.batch_size, samples, steps, request.epochs),
        seed=request.seed,
        device=device,
        placement=request.placement or "spread",
        threads_per_device=threads,
        prefix=request.prefix,
        schedule=request.schedule,
        optimizer_bytes_per_byte=summary.optimizer_bytes_per_byte,
        draws=summary.dropout or summary.random,
        ranks=ranks,
        shard_groups=shard_groups,
        axes=_describe_axes(request, ranks, parts, lossy),
        shard_units=shard_units(parts.zero, summary, parts.stage_parts, reasons),
        sequence_parallel=bool(request.sequence_parallel),
        compile=bool(request.compile),
        compiled=choose_compiled(request, summary, device, reasons),
        recompute=request.recompute,
        recomputed=choose_recomputed(request, summary, parts.stage_parts, reasons),
        arithmetic=arithmetic(batch, ranks),
        reasons=tuple(reasons),
        remarks=(
            *remarks_on(request, machine, layout, threads),
            *remark_on_mps(reasons),
            *remark_on_samples(batch.batch_size, samples, summary.name),
            *remark_on(parts.tensor_plan),
            *remark_on_sequence(parts.sequence_plan),
            *remark_on_experts(parts.expert_plan),
        ),
        differences=(
            *describe_loss(lossy),
            *differences_of(
                summary, precision.precision, batch, ranks, layout, bool(request.compile)
            ),
        ),
    )


def _link(
    request: Request,
    machine: Machine,
    layout: Layout,
    summary: Summary,
    probe: Callable[[str], Probe],
    reasons: Reasons,
) -> _Links:
    backend = choose_backend(request, machine, layout, probe, reasons)
    mps = choose_mps(request, layout, probe, reasons)
    bucket_mb = choose_bucket(request, machine, layout, summary, backend, mps, reasons)
    staging = choose_staging(machine, layout, summary, backend, bucket_mb, reasons)
    return _Links(backend, mps, bucket_mb, staging, nccl_environment(layout, backend))


def _divide(
    request: Request,
    batch: BatchPlan,
    summary: Summary,
    given_schedule: str | None,
    cuts: Sequence[str],
    reasons: Reasons,
) -> _Parts:
    chunks = _count_chunks(request, batch, given_schedule, reasons)
    zero = choose_zero(request, reasons)
    layers = keep_together(summary.layers, summary.tensor_plan, batch.stages * chunks)
    summary = replace(summary, layers=layers) if splits_layers(request) else summary
    stages = cut_into_stages(request, batch.stages, chunks, summary, cuts, reasons)
    split = require_groups(request, batch.shards, stages, summary, reasons)
    sequence = require_blocks(request, batch.shards, summary, reasons)
    experts = require_experts(request, batch.shards, summary, reasons)
    return _Parts(chunks, zero, stages, split, sequence, experts)


def _describe_axes(
    request: Request, ranks: Sequence[RankPlan], parts: _Parts, lossy: Lossy
) -> tuple[Axis, ...]:
    return describe_axes(
        [rank.cell for rank in ranks],
        parts.zero,
        stages=shards_stages(request),
        averages=bool(lossy.sync_every),
        sequences=parts.sequence_plan is not None,
        experts=parts.expert_plan is not None,
    )


def _choose_length(
    request: Request, summary: Summary, reasons: Reasons
) -> tuple[int | None, int | None]:
    """Return the samples per epoch and the number of optimizer steps. The first is None if the data
    is endless, and the second if only the number of epochs limits the run."""
    available = summary.samples
    if request.samples is not None and available is not None and request.samples > available:
        raise UsageError(
            f"--samples {request.samples}: {summary.name} has only {plural(available, 'sample')}.",
            fix=f"--samples {available} or fewer",
        )
    samples = request.samples or available
    if request.epochs and samples is None:
        raise UsageError(
            f"--epochs {request.epochs}: {summary.name} generates endless data with get_batch, so "
            "it has no epochs.",
            fix=f"--steps {request.epochs * 100}, or --samples N to define an epoch",
        )
    if request.epochs:
        return samples, request.steps

    because = "enough for a median; use --steps or --epochs for real training"
    return samples, reasons.choose("steps", request.steps, DEFAULT_STEPS, because)


def _count_chunks(request: Request, batch: BatchPlan, given: str | None, reasons: Reasons) -> int:
    """Return the number of model parts per stage with this schedule."""
    if request.schedule is None:
        return 1
    chunks = PARTS_PER_RANK[request.schedule]
    idle = ideal_bubble(batch.stages, batch.micro_batches, request.schedule)
    because = "each shard of a stage has its own process"
    because = "FSDP needs a process per stage" if shards_stages(request) else because
    because = "requested" if given else because
    because += f"; the ideal bubble is {idle:.1%} of the time"
    because += f"; {chunks} model parts per stage" if chunks > 1 else ""
    reasons.add("schedule", request.schedule, because)
    return chunks


def _choose_find_unused(request: Request, summary: Summary, reasons: Reasons) -> bool:
    """Return whether DDP must look for parameters without a gradient."""
    uses_ddp = request.strategy in BUCKETED or request.zero == 1
    if not uses_ddp or has_process_per_cell(request):
        return False
    if not (request.find_unused or summary.unused):
        return False

    names = ", ".join(summary.unused[:3]) + (", …" if len(summary.unused) > 3 else "")
    if request.strategy == "hybrid":
        raise UsageError(
            f"hybrid cannot train {summary.name}: in a trial step, "
            f"{plural(len(summary.unused), 'parameter')} got no gradient ({names}), "
            "but the stages wait for every gradient.",
            fix="requires_grad_(False) for these parameters, or use ddp",
        )
    given = "yes" if request.find_unused else None
    reasons.choose("find_unused_parameters", given, "yes", f"no gradient in a trial step: {names}")
    return True
