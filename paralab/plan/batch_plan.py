"""`BatchPlan`: the numbers that split a batch, and the equation that they satisfy."""

from __future__ import annotations

from dataclasses import dataclass

from paralab.errors import UsageError
from paralab.plan.batches import pieces, shares
from paralab.plan.plan import RankPlan, Reasons
from paralab.plan.request import (
    PIPELINED,
    REPLICATED,
    STAGED,
    Request,
    count_shards,
    has_process_per_cell,
    has_shards,
    splits_experts,
)
from paralab.plan.schedules import misfit
from paralab.units import plural
from paralab.workload.summary import Summary


@dataclass(frozen=True)
class BatchPlan:
    replicas: int
    stages: int
    batch_size: int
    accumulate: int
    micro_batches: int
    shards: int = 1


def plan_batch(request: Request, summary: Summary, reasons: Reasons) -> BatchPlan:
    """Fill in the numbers that were not requested, or raise an error with the failed equation."""
    strategy, accumulate = request.strategy, request.accumulate or 1
    replicas = stages = 1
    if strategy in REPLICATED:
        because = "the smallest number of replicas that share a batch"
        replicas = reasons.choose("replicas", request.replicas, 2, because)
    if strategy in STAGED:
        because = "the smallest number of devices that share a model"
        stages = reasons.choose("stages", request.stages, 2, because)
    shards = count_shards(request)
    if has_shards(request) or splits_experts(request):
        what = "the experts" if splits_experts(request) else "each layer or sequence"
        because = f"the smallest number of devices that share {what}"
        reasons.choose("shards", request.shards, shards, because)
    if splits_experts(request):
        replicas = shards  # each shard has all other parameters, and its part of the batch
    because = f"the default for workload {summary.name}"
    batch_size = reasons.choose("batch size", request.batch_size, summary.batch_size, because)

    if batch_size < replicas:
        parts = "shards" if splits_experts(request) else "replicas"
        raise UsageError(
            f"A batch of {batch_size} cannot be split over {replicas} {parts}.",
            fix=f"--batch-size {replicas} or more, or --{parts} {batch_size} or fewer",
        )
    per_rank = batch_size if strategy == "dp" else min(shares(batch_size, replicas))
    # DataParallel splits each accumulation step over its replicas.
    sharing = replicas if strategy == "dp" else 1
    if per_rank < accumulate * sharing:
        over = f" × {replicas} replicas" if strategy == "dp" else ""
        raise UsageError(
            f"{plural(per_rank, 'sample')} cannot be split over {accumulate} accumulation "
            f"steps{over}.",
            fix=f"--accumulate {per_rank // sharing} or fewer, "
            f"or --batch-size {accumulate * replicas} or more",
        )
    micro_batches = 1
    if strategy in PIPELINED and (request.schedule or not has_process_per_cell(request)):
        micro_batches = _choose_micro_batches(request, stages, per_rank // accumulate, reasons)
    batch = BatchPlan(replicas, stages, batch_size, accumulate, micro_batches, shards)
    _require_samples(batch, per_rank // accumulate)
    return batch


def _choose_micro_batches(request: Request, stages: int, samples: int, reasons: Reasons) -> int:
    """Return the requested number, or 2 per stage if the samples and the schedule allow it."""
    schedule = request.schedule
    most = min(2 * stages, samples)
    fitting = [n for n in range(1, most + 1) if not schedule or not misfit(schedule, stages, n)]
    because = f"2 × {plural(stages, 'stage')}, or fewer for a small batch; more shrink the bubble"
    default = max(fitting, default=most)
    micro_batches = reasons.choose("micro-batches", request.micro_batches, default, because)

    if schedule and (problem := misfit(schedule, stages, micro_batches)):
        few = samples < 2 * stages
        raise UsageError(
            f"--schedule {schedule} cannot run {plural(micro_batches, 'micro-batch')}: {problem}.",
            fix=f"--micro-batches {2 * stages}, or another multiple of {stages}"
            + (f" (there are only {plural(samples, 'sample')} to split)" if few else ""),
        )
    return micro_batches


def _require_samples(batch: BatchPlan, samples: int) -> None:
    """Require a sample for each micro-batch in the smallest accumulation step on any rank."""
    if samples >= batch.micro_batches:
        return
    needed, replicas = batch.micro_batches * batch.accumulate, batch.replicas
    sizes = range(replicas, 4 * replicas * needed)  # larger batches always suffice
    enough = 1 + max(size for size in sizes if min(shares(size, replicas)) < needed)
    raise UsageError(
        f"{plural(samples, 'sample')} (batch {batch.batch_size} ÷ {plural(replicas, 'replica')} "
        f"÷ {plural(batch.accumulate, 'accumulation step')}) cannot be split into "
        f"{batch.micro_batches} micro-batches: {samples} < {batch.micro_batches}.",
        fix=f"--micro-batches {samples} or fewer, or --batch-size {enough} or more",
    )


def arithmetic(batch: BatchPlan, ranks: tuple[RankPlan, ...]) -> str:
    """Return the equation, such as `64 = 2 ranks × 4 accumulation steps × 8 samples`. If the shares
    are uneven, return a sum."""
    everywhere = f", on each of {batch.shards} shards" if ranks[-1].shard else ""
    return _equation(batch, ranks) + everywhere


def _equation(batch: BatchPlan, ranks: tuple[RankPlan, ...]) -> str:
    in_one_process = any(device.role.startswith("replica ") for device in ranks[0].devices)
    per_rank = tuple(rank.samples_per_step for rank in ranks if not rank.stage and not rank.shard)
    parts = ranks[0].split if in_one_process else per_rank

    # All ranks in one pipelined replica process the same samples.
    owner = "replica" if in_one_process or ranks[0].stage is not None else "rank"
    owners = [plural(len(parts), owner)] if len(parts) > 1 else []
    numbers = [(batch.accumulate, "accumulation step"), (batch.micro_batches, "micro-batch")]
    cuts = [plural(number, noun) for number, noun in numbers if number > 1]

    samples, left = divmod(batch.batch_size, len(parts) * batch.accumulate * batch.micro_batches)
    if not left:
        return f"{batch.batch_size} = " + " × ".join([*owners, *cuts, plural(samples, "sample")])
    if owners:
        each = f", each in {' × '.join(cuts)}" if cuts else ""
        return f"{batch.batch_size} = {' + '.join(map(str, parts))} samples on {owners[0]}{each}"
    rows = pieces(batch.batch_size, batch.accumulate, batch.micro_batches)
    sizes = [stop - start for row in rows for start, stop in row]
    return f"{batch.batch_size} = {' + '.join(map(str, sizes))} samples in {' × '.join(cuts)}"
