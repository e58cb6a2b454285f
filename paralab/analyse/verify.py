"""Decide whether a configuration trains like a single device, from the differences that its ranks
measured.

    fp64   each parameter is within 1e-10 of the single device's
    fp32   each parameter is within 1e-5 of its update: the norm of the difference divided by the
           norm of the tensor's update (or of a typical tensor's update if that is larger, because
           sums that cancel keep their terms' rounding errors)

Losses, buffers, and first-step gradients must meet the same tolerance, relative to their size.

A lossy configuration (`paralab.plan.lossy`) is never equal to a single device. The check compares it
with a simulation of the same algorithm instead, with the same tolerances.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from paralab.plan.option import flag_of
from paralab.plan.plan import Plan
from paralab.record.events import Verify
from paralab.record.types import Record
from paralab.units import difference, plural

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "tf32": 1e-5, "bf16": 1e-5, "fp16": 1e-5}
# How much rounding may change the first step's gradients, relative to the largest gradient.
ROUNDING = {"fp64": 1e-10, "fp32": 1e-4, "tf32": 0.1, "bf16": 0.5, "fp16": 0.5}


LOSSY = ("compress", "powersgd_rank", "sync_every", "outer_lr", "outer_momentum")
WAYS = ("schedule", "zero", "shard_groups", "recompute", "compile", *LOSSY)


class _Differences(Record, frozen=True, kw_only=True):
    equal: bool
    max_difference: float | None = None  # of a parameter; None if not finite or the run failed
    gradient_difference: float | None = None
    loss_difference: float | None = None
    buffers: dict[str, float | None] = msgspec.field(default_factory=dict)  # those that differ
    tolerance: float
    measure: str


class Excuse(_Differences, frozen=True, kw_only=True):
    """The differences between training as configured and a single device, and their known
    reasons."""

    reasons: list[str]


class Verification(_Differences, frozen=True, kw_only=True):
    """Whether a configuration trains like a single device. `control` lists what both sides held fixed.

    For a lossy configuration, `equal` is False, and `as_simulated` says whether it equals its
    simulation on one device; for all others, `as_simulated` is None. `excused` has the differences
    from a single device that have a known reason."""

    as_simulated: bool | None = None
    steps: int
    worst_parameter: str | None = None
    cause: str | None = None  # why it differs
    serious: bool  # True if the difference is always a mistake
    control: tuple[str, ...] = ()
    excused: Excuse | None = None

    @property
    def passed(self) -> bool:
        """Whether training is correct: like a single device, or as simulated."""
        return self.equal or self.as_simulated is True


class VerifyOptions(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Options that distinguish a configuration from the others."""

    workload: str
    batch_size: int
    partial_last_batch: bool
    varying_weights: bool
    accumulate: int | None = None
    replicas: int | None = None
    stages: int | None = None
    shards: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    zero: int | None = None
    shard_groups: int | None = None
    recompute: str | None = None
    compile: bool | None = None
    compress: str | None = None
    powersgd_rank: int | None = None
    sync_every: int | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None

    @property
    def ways(self) -> dict[str, Any]:
        """The options that change how the strategy works, rather than how it splits the batch."""
        return {name: value for name in WAYS if (value := getattr(self, name)) is not None}


class Verified(Verification, frozen=True, kw_only=True):
    strategy: str
    options: VerifyOptions
    arithmetic: str


class Skipped(Record, frozen=True, kw_only=True):
    strategy: str
    options: VerifyOptions
    reason: str


class VerifyResult(Record, frozen=True, kw_only=True):
    """The result of `verify --json`. `passed` is True if every configuration that ran is equal to
    one device or, if it is lossy, to its simulation."""

    strategy: str
    workloads: list[str]
    precision: str
    passed: bool
    steps: int
    configurations: list[Verified]
    skipped: list[Skipped]
    dropout: str
    state: dict[str, list[str]]  # workload -> state that each forward call changes
    seconds: float
    run_folder: str


def judge(
    precision: str,
    ranks: Sequence[Verify],
    split_problem: str | None = None,
    reference: str = "the single device",
) -> Verification:
    """Return the differences, whether they are within tolerance, and the cause if they are not.
    `split_problem` is a problem with the loss or the model that the single-device run found."""
    tolerance, expected = TOLERANCE[precision], map(float, ranks[0].reference_losses)
    losses = [sum(map(float, step)) for step in zip(*(rank.losses for rank in ranks), strict=True)]
    loss_errors = [
        abs(mine - theirs) / max(1.0, abs(theirs))
        for mine, theirs in zip(losses, expected, strict=True)
    ]
    buffers = _buffers(ranks, tolerance)
    errors = [
        float(rank.parameter_error if precision == "fp64" else rank.parameter_error_of_update)
        for rank in ranks
    ]
    differences = {
        "parameters": _largest(errors),
        "gradients": _largest(
            float(rank.gradient_error) / (float(rank.gradient_size) or 1.0) for rank in ranks
        ),
        "losses": _largest(loss_errors),
        "buffers": _largest(buffers.values()),
    }
    same = not _has_diverged(ranks) and not _count_uncompared(ranks)
    equal = all(value <= tolerance for value in differences.values()) and same
    serious = _serious(ranks, differences)
    worst = ranks[errors.index(max(errors))].worst_parameter

    cause = None
    if not equal and _reference_fails(ranks):
        cause = "the loss of a single device is not finite either, so there is nothing to compare"
    elif not equal:
        cause = split_problem or _counted_several_times(ranks) or serious
        cause = cause or _guess(
            ranks, differences, buffers, loss_errors, tolerance, worst, reference
        )
    known, known_buffers = (
        {name: value if math.isfinite(value) else None for name, value in values.items()}
        for values in (differences, buffers)
    )
    return Verification(
        equal=equal,
        steps=len(losses),
        max_difference=known["parameters"],
        gradient_difference=known["gradients"],
        loss_difference=known["losses"],
        buffers=known_buffers,
        tolerance=tolerance,
        measure=_measure(precision),
        worst_parameter=worst,
        cause=cause,
        serious=serious is not None,
    )


def failed_verification(precision: str, error: str) -> Verification:
    """Return the outcome for a configuration whose run failed."""
    return Verification(
        equal=False,
        steps=0,
        tolerance=TOLERANCE[precision],
        measure=_measure(precision),
        cause=f"it failed: {error}",
        serious=True,
    )


def compared_with_simulation(proof: Verification) -> Verification:
    """Return the outcome for a lossy configuration, whose reference was a simulation."""
    return replace(proof, equal=False, as_simulated=proof.equal)


def with_excuse(proof: Verification, plan: Plan, asked: Verification | None) -> Verification:
    """Return the outcome for a configuration that differs from one device for a known reason.

    `proof` ran without the known reason and decides the outcome. `asked` ran as configured and
    shows the difference. A known reason excuses only the differences that it explains: see
    `_inexcusable`."""
    if asked is None:
        return proof
    problem = _inexcusable(proof, plan.precision, asked) if proof.passed else None
    if problem:
        as_simulated = None if proof.as_simulated is None else False
        proof = replace(proof, equal=False, as_simulated=as_simulated, cause=problem)
    return replace(proof, excused=Excuse.like(asked, reasons=list(plan.differences)))


def _inexcusable(proof: Verification, precision: str, asked: Verification) -> str | None:
    """Return a difference that no known reason explains."""
    if asked.serious:
        return f"as configured ({precision}), {asked.cause}"
    gradients, limit = asked.gradient_difference, ROUNDING[precision]
    if "casts" in proof.control:
        limit = max(limit, ROUNDING["fp32"])
    # True if rounding is the only known reason.
    rounds = set(proof.control) <= {"casts"} and proof.as_simulated is None
    if rounds and gradients is not None and gradients > limit:
        return (
            f"in {precision}, the first step's gradients differ by {gradients:.2g}, more than "
            "rounding explains; equal in fp64, so the forward pass depends on the precision"
        )
    return None


CONTROLS = {
    "batch_norm": "BatchNorm",
    "random": "random numbers",
    "state": "state that the forward pass changes",
    "casts": "casts to fp32",
    "rank_order": "the order of additions",
}


def apart_from(proof: Verification) -> str:
    """Return what was held fixed (`BatchNorm and random numbers`), or "" if it did not matter."""
    if not proof.excused or proof.excused.equal:
        return ""
    fixed = " and ".join(CONTROLS[kind] for kind in proof.control)
    return fixed or ("rounding" if proof.as_simulated is None else "")


def _measure(precision: str) -> str:
    relative = "" if precision == "fp64" else ", relative to its update"
    return f"largest parameter difference{relative}"


def _buffers(ranks: Sequence[Verify], tolerance: float) -> dict[str, float]:
    """Return the buffers that differ, with their largest difference on any rank."""
    errors: dict[str, float] = {}
    for rank in ranks:
        for name, error in rank.buffer_errors.items():
            errors[name] = _largest([errors.get(name, 0.0), float(error)])
    return {name: error for name, error in errors.items() if not error <= tolerance}


def _guess(
    ranks: Sequence[Verify],
    differences: dict[str, float],
    buffers: dict[str, float],
    loss_errors: list[float],
    tolerance: float,
    worst_parameter: str,
    reference: str,
) -> str:
    """Explain why training differs, based on the first quantity that differs."""
    factor, residual = float(ranks[0].gradient_factor), float(ranks[0].gradient_residual)
    if abs(factor - 1.0) > 1e-3 and residual < 1e-4:
        scaled = f"{factor:.4g} × {reference}'s gradient in the first step"
        return f"wrong scale: {scaled}, so losses are not weighted by their share of the batch"
    if loss_errors and loss_errors[0] > tolerance:
        check = "check the samples, the weights of the parts, and the forward pass"
        return f"the first step's loss differs: {check}"
    if differences["gradients"] > tolerance:
        wrong = "the parts' gradients are not added up correctly"
        return f"the first step's gradients differ but its loss does not: {wrong}"
    if extra := sorted({name for rank in ranks for name in rank.extra_gradients}):
        zero = "get a zero gradient instead of None, so weight decay or momentum changes them"
        return f"{', '.join(extra[:3])} {zero}"
    late = next((step for step, error in enumerate(loss_errors) if error > tolerance), None)
    if late is not None:
        where = "(check data, partial batches, optimizer, and state)"
        return f"the first step is equal; from step {late} on, the losses differ {where}"
    if differences["parameters"] > tolerance:
        differs = f"{worst_parameter} is not (check the optimizer and unused parameters)"
        return f"the losses of all {plural(len(loss_errors), 'step')} are equal, but {differs}"
    worst = max(buffers, key=lambda name: buffers[name])
    return f"the parameters are equal, but the buffer {worst} differs by {buffers[worst]:.2g}"


def _counted_several_times(ranks: Sequence[Verify]) -> str | None:
    """Report ranks that each return the loss of the entire batch."""
    full = [
        rank
        for rank in ranks
        if any(map(float, rank.losses))
        and all(
            math.isclose(float(mine), float(theirs), rel_tol=1e-4)
            for mine, theirs in zip(rank.losses, rank.reference_losses, strict=True)
        )
    ]
    if len(full) < 2:
        return None
    return f"the loss is counted {len(full)} times: each rank reports the loss of the entire batch"


def _serious(ranks: Sequence[Verify], differences: dict[str, float]) -> str | None:
    """Return a problem that is always a mistake, or None."""
    unknown = any(not math.isfinite(v) for name, v in differences.items() if name != "buffers")
    if unknown and not _reference_fails(ranks):
        return "a loss, gradient, or parameter is not finite"
    missing = sorted({name for rank in ranks for name in rank.missing_gradients})
    if missing:
        return f"no gradient for {', '.join(missing[:3])}: the loss does not reach these parameters"
    if left := _count_uncompared(ranks):
        return f"no rank holds {plural(left, 'parameter')}, so they were not compared"
    if _has_diverged(ranks):
        different = f"after training, the {len(ranks)} ranks hold different parameters"
        return f"missing synchronization: {different}"
    return None


def _reference_fails(ranks: Sequence[Verify]) -> bool:
    """Return whether a loss of the single device is infinite or NaN. In fp64, the masks of some
    Hugging Face models overflow in their fp32 softmax."""
    return not all(math.isfinite(float(loss)) for loss in ranks[0].reference_losses)


def _has_diverged(ranks: Sequence[Verify]) -> bool:
    """Return whether replicas finish with different values. Shards compute the gradients of
    replicated parameters separately, so they may differ by rounding."""
    places = {(rank.stage, rank.shard) for rank in ranks}
    return len({(rank.stage, rank.shard, rank.digest) for rank in ranks}) > len(places)


def _count_uncompared(ranks: Sequence[Verify]) -> int:
    """Return the number of reference parameters that no rank compared."""
    compared = {rank.stage: rank.compared for rank in ranks if rank.compared is not None}
    return max(0, ranks[0].of - sum(compared.values())) if compared else 0


def _largest(values: Iterable[float]) -> float:
    """Return the maximum, or NaN if any value is NaN."""
    known = list(values)
    return math.nan if any(map(math.isnan, known)) else max(known, default=0.0)


def describe_simulated(proof: Verification) -> str:
    """`as simulated, weights differ by 3e-04 from single`."""
    distance = proof.excused.max_difference if proof.excused else None
    differ = "an unknown amount" if distance is None else difference(distance, 0)
    return f"{outcome(proof)}, weights differ by {differ} from single"


def outcome(proof: Verification) -> str:
    """Return `equal`, `equal apart from BatchNorm`, `as simulated`, or `DIFFERS`."""
    if not proof.passed:
        return "DIFFERS"
    reason = f" apart from {apart_from(proof)}" if apart_from(proof) else ""
    return f"{'as simulated' if proof.as_simulated else 'equal'}{reason}"


def alike(equal: int, total: int) -> str:
    """`2 of 3 configurations train like a single device`."""
    verb = "trains" if equal == 1 else "train"
    return f"{equal} of {plural(total, 'configuration')} {verb} like a single device"


def headline(result: VerifyResult) -> str:
    """Return `48 of 54 configurations train like a single device …; 6 did not run`."""
    ran, skipped = result.configurations, result.skipped
    equal = [each for each in ran if each.equal]
    simulated = sum(each.as_simulated is True for each in ran)
    apart, differ = sum(bool(apart_from(each)) for each in equal), len(ran) - len(equal) - simulated
    text = (
        f"{alike(len(equal), len(ran) + len(skipped))} over {plural(result.steps, 'step')} "
        f"({result.precision}, {ran[0].measure} within {ran[0].tolerance:g})"
    )
    text += f"; {apart} of these with a known cause held fixed (see below)" if apart else ""
    if simulated:
        text += f"; {simulated} {'is' if simulated == 1 else 'are'} lossy: as simulated"
    text += f"; {differ} {'differs' if differ == 1 else 'differ'}" if differ else ""
    return text + (f"; {len(skipped)} did not run" if skipped else "")


def skipped_by_reason(result: VerifyResult) -> list[tuple[str, int, str]]:
    """Return one entry per reason: the strategies, the number of configurations, and the reason."""
    by_reason: dict[str, list[str]] = {}
    for each in result.skipped:
        flags = [
            flag_of(name) if value is True else f"{flag_of(name)} {value}"
            for name, value in each.options.ways.items()
        ]
        by_reason.setdefault(each.reason, []).append(" ".join([each.strategy, *flags]))
    return [
        (", ".join(dict.fromkeys(names)), len(names), reason) for reason, names in by_reason.items()
    ]
