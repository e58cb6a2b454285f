"""`Shape`: the numbers that cut a batch, checked against each other, and their equation as a
sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paralab.errors import UsageError
from paralab.plan.batches import pieces, shares
from paralab.plan.plan import RankPlan
from paralab.plan.request import APPLIES, Request
from paralab.plan.schedules import misfit
from paralab.units import plural
from paralab.workload.summary import Summary

Choose = Callable[
    [str, object, object, str], None
]  # (choice, what was asked, what was chosen, why)


@dataclass(frozen=True)
class Shape:
    replicas: int
    stages: int
    batch_size: int
    accumulate: int
    micro_batches: int


def shape_of(request: Request, summary: Summary, choose: Choose) -> Shape:
    """What was asked, completed; or the equation that does not hold, with its numbers."""
    strategy = request.strategy
    replicas = request.replicas or (2 if strategy in APPLIES["replicas"] else 1)
    stages = request.stages or (2 if strategy in APPLIES["stages"] else 1)
    batch_size = request.batch_size or summary.batch_size
    accumulate = request.accumulate or 1
    if strategy in APPLIES["replicas"]:
        choose(
            "replicas",
            request.replicas,
            replicas,
            "two copies are the smallest number that shares a batch",
        )
    if strategy in APPLIES["stages"]:
        choose(
            "stages",
            request.stages,
            stages,
            "two devices are the smallest number that shares a model",
        )
    choose("batch size", request.batch_size, batch_size, f"the default of workload {summary.name}")
    if batch_size < replicas:
        raise UsageError(
            f"A batch of {batch_size} cannot be shared by {replicas} replicas: {batch_size} < {replicas}.",
            fix=f"--batch-size {replicas} or more, or --replicas {batch_size} or fewer",
        )
    least = _least_pass(strategy, batch_size, replicas, accumulate)
    micro_batches = request.micro_batches or 1
    if strategy in APPLIES["micro_batches"]:
        micro_batches = request.micro_batches or _fitting(
            request.schedule, stages, min(2 * stages, least)
        )
        idle = f"2 × {plural(stages, 'stage')}, or as many as there are samples: more pieces, shorter idle times"
        choose("micro-batches", request.micro_batches, micro_batches, idle)
        if request.schedule and (problem := misfit(request.schedule, stages, micro_batches)):
            raise UsageError(
                f"--schedule {request.schedule} --micro-batches {micro_batches}: {problem}.",
                fix=f"--micro-batches {2 * stages}, or another multiple of {stages}"
                + (f" (a pass has {plural(least, 'sample')} to cut)" if least < 2 * stages else ""),
            )
    if least < micro_batches:
        raise UsageError(
            f"--micro-batches {micro_batches}: a pass of {plural(least, 'sample')} "
            f"(batch {batch_size} ÷ {plural(replicas, 'replica')} ÷ {accumulate} accumulation) cannot be cut into "
            f"{micro_batches}: {least} < {micro_batches}.",
            fix=f"--micro-batches {least} or fewer, or --batch-size {_enough(request, replicas, micro_batches)} or more",
        )
    return Shape(replicas, stages, batch_size, accumulate, micro_batches)


def _fitting(schedule: str | None, stages: int, most: int) -> int:
    """As many micro-batches as the schedule can run, up to `most`; `most` itself where none fits,
    for the error to tell."""
    fitting = [
        number
        for number in range(most, 0, -1)
        if schedule is None or not misfit(schedule, stages, number)
    ]
    return fitting[0] if fitting else most


def _enough(request: Request, replicas: int, needed: int) -> int:
    """The smallest batch whose smallest pass has `needed` samples, and every larger one's too."""
    accumulate = request.accumulate or 1
    most = (
        4 * replicas * accumulate * needed
    )  # the last share of a chunked batch is never smaller than that allows
    short = [
        size
        for size in range(replicas, most)
        if _smallest(request.strategy, size, replicas, accumulate) < needed
    ]
    return max(short) + 1


def _smallest(strategy: str, batch_size: int, replicas: int, accumulate: int) -> int:
    per_rank = batch_size if strategy == "dp" else min(shares(batch_size, replicas))
    return per_rank // accumulate


def _least_pass(strategy: str, batch_size: int, replicas: int, accumulate: int) -> int:
    """Samples of the smallest backward pass of any rank; there must be one for every replica that
    shares it."""
    # DataParallel splits every accumulation step over its replicas; with a process per replica the
    # rank's share is cut.
    sharing = replicas if strategy == "dp" else 1
    per_rank = batch_size if strategy == "dp" else min(shares(batch_size, replicas))
    if per_rank < accumulate * sharing:
        pieces_needed = (
            f"{accumulate} × {replicas} replicas" if strategy == "dp" else str(accumulate)
        )
        raise UsageError(
            f"--accumulate {accumulate}: {per_rank} samples cannot be cut into {pieces_needed} pieces.",
            fix=f"--accumulate {per_rank // sharing} or less, or --batch-size {accumulate * replicas} or more",
        )
    return _smallest(strategy, batch_size, replicas, accumulate)


def arithmetic(shape: Shape, ranks: tuple[RankPlan, ...]) -> str:
    """`64 = 2 ranks × 4 accumulation steps × 8 samples`; uneven shares are added up instead."""
    replicated = any(
        device.role.startswith("replica ") for device in ranks[0].devices
    )  # DataParallel, in one process
    parts = (
        ranks[0].split
        if replicated
        else tuple(rank.samples_per_step for rank in ranks if not rank.stage)
    )
    staged = ranks[0].stage is not None  # the ranks of a replica see the same samples
    owners = (
        [plural(len(parts), "replica" if replicated or staged else "rank")]
        if len(parts) > 1
        else []
    )
    cuts = [(shape.accumulate, "accumulation step"), (shape.micro_batches, "micro-batch")]
    cut = [plural(number, noun) for number, noun in cuts if number > 1]
    samples, left = divmod(shape.batch_size, len(parts) * shape.accumulate * shape.micro_batches)
    if not left:
        return f"{shape.batch_size} = " + " × ".join([*owners, *cut, plural(samples, "sample")])
    if owners:
        each = f", each in {' × '.join(cut)}" if cut else ""
        return f"{shape.batch_size} = {' + '.join(map(str, parts))} samples on {owners[0]}{each}"
    sizes = [
        stop - start
        for row in pieces(shape.batch_size, shape.accumulate, shape.micro_batches)
        for start, stop in row
    ]
    return f"{shape.batch_size} = {' + '.join(map(str, sizes))} samples in {' × '.join(cut)}"
