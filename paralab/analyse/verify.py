"""Is it the same training? The outcome for one configuration, from what its ranks measured against
a single device.

    fp64   every parameter within 1e-10 of the single device's
    fp32   every parameter within 1e-5 of its update: norm of the difference over norm of the
           tensor's update (or of a typical tensor's update, if that is larger: sums that cancel
           keep the rounding of their terms)

Losses, buffers, and the gradients of the first step must meet the same tolerance, relative to their
size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from paralab.plan.plan import Plan
from paralab.record.events import Verify
from paralab.record.types import Record
from paralab.units import plural

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "tf32": 1e-5, "bf16": 1e-5, "fp16": 1e-5}
# How far rounding may move the gradients of the first step, relative to the largest gradient.
ROUNDING = {"fp64": 1e-10, "fp32": 1e-4, "tf32": 0.1, "bf16": 0.5, "fp16": 0.5}


class _Differences(Record, frozen=True, kw_only=True):
    equal: bool
    max_difference: float | None  # of a parameter; None: not finite, or it failed
    gradient_difference: float | None
    loss_difference: float | None
    buffers: dict[str, float | None]  # those that differ
    tolerance: float
    measure: str


class Excuse(_Differences, frozen=True, kw_only=True):
    """How far the training as requested is from a single device, and the known reasons."""

    reasons: list[str]


class Verification(_Differences, frozen=True, kw_only=True):
    """Does a configuration train like a single device? `control` was held fixed on both sides."""

    steps: int
    worst_parameter: str | None
    cause: str | None  # why it differs
    serious: bool  # a mistake whatever else is wrong
    control: tuple[str, ...] = ()
    excused: Excuse | None = None


class VerifyOptions(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What distinguishes a configuration from the others."""

    workload: str
    batch_size: int
    partial_last_batch: bool
    varying_weights: bool
    accumulate: int | None = None
    replicas: int | None = None
    stages: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None


class Verified(Verification, frozen=True, kw_only=True):
    strategy: str
    options: VerifyOptions
    arithmetic: str


class Skipped(Record, frozen=True, kw_only=True):
    strategy: str
    options: VerifyOptions
    reason: str


class VerifyResult(Record, frozen=True, kw_only=True):
    """What `verify --json` prints. `passed`: every configuration that ran is equal."""

    strategy: str
    workloads: list[str]
    precision: str
    passed: bool
    steps: int
    configurations: list[Verified]
    skipped: list[Skipped]
    dropout: str
    state: dict[str, list[str]]  # workload -> what its forward changes in every call
    seconds: float
    run_folder: str


def judge(
    precision: str, ranks: Sequence[Verify], split_problem: str | None = None
) -> Verification:
    """The differences, whether they are within the tolerance, and the cause if they are not.

    `split_problem`: what a single device found wrong with the loss or the model."""
    tolerance = TOLERANCE[precision]
    losses = [
        sum(float(rank.losses[step]) for rank in ranks) for step in range(len(ranks[0].losses))
    ]
    loss_errors = [
        abs(mine - float(theirs)) / max(1.0, abs(float(theirs)))
        for mine, theirs in zip(losses, ranks[0].reference_losses, strict=True)
    ]
    buffers = _buffers(ranks, tolerance)
    differences = {
        "parameters": _largest(_parameter_error(rank, precision) for rank in ranks),
        "gradients": _largest(
            float(rank.gradient_error) / (float(rank.gradient_size) or 1.0) for rank in ranks
        ),
        "losses": _largest(loss_errors),
        "buffers": _largest(buffers.values()),
    }
    same = not _diverged(ranks) and not _uncompared(ranks)
    equal = all(value <= tolerance for value in differences.values()) and same

    cause = None
    if not equal:
        cause = _cause(ranks, differences, buffers, loss_errors, tolerance, split_problem)
    worst = max(ranks, key=lambda rank: _parameter_error(rank, precision))
    return Verification(
        equal=equal,
        steps=len(losses),
        max_difference=_finite(differences["parameters"]),
        gradient_difference=_finite(differences["gradients"]),
        loss_difference=_finite(differences["losses"]),
        buffers={name: _finite(value) for name, value in buffers.items()},
        tolerance=tolerance,
        measure=_measure(precision),
        worst_parameter=worst.worst_parameter,
        cause=cause,
        serious=_serious(ranks, differences) is not None,
    )


def failed_verification(precision: str, error: str) -> Verification:
    """The outcome for a configuration whose run failed."""
    return Verification(
        equal=False,
        steps=0,
        max_difference=None,
        gradient_difference=None,
        loss_difference=None,
        buffers={},
        tolerance=TOLERANCE[precision],
        measure=_measure(precision),
        worst_parameter=None,
        cause=f"it failed: {error}",
        serious=True,
    )


def with_excuse(proof: Verification, plan: Plan, asked: Verification | None) -> Verification:
    """The outcome for a configuration that differs from one device for a known reason.

    `proof` ran with the reason removed and decides; `asked` ran as requested and gives the size of
    the difference. An excuse covers only what it explains: see `_inexcusable`."""
    if asked is None:
        return proof
    excuse = Excuse(
        reasons=list(plan.differences),
        **{name: asked[name] for name in _Differences.__struct_fields__},
    )
    problem = _inexcusable(proof, plan.precision, asked)
    if proof.equal and problem:
        proof = replace(proof, equal=False, cause=problem)
    return replace(proof, excused=excuse)


def _inexcusable(proof: Verification, precision: str, asked: Verification) -> str | None:
    """What no known reason explains: a failed run, ranks with different parameters, gradients
    beyond rounding."""
    if asked.serious:
        return f"as requested ({precision}), {asked.cause}"
    gradients = asked.gradient_difference
    if not proof.control and gradients is not None and gradients > ROUNDING[precision]:
        return (
            f"in {precision} the gradients of the first step differ by {gradients:.2g}, more than "
            "rounding explains. In fp64 they are equal, so the forward depends on the precision"
        )
    return None


CONTROLS = {
    "batch_norm": "BatchNorm",
    "random": "random numbers",
    "state": "what its forward changes",
}


def apart_from(proof: Verification) -> str:
    """`BatchNorm and random numbers`: what was held fixed, if it makes a difference; else empty."""
    if not proof.excused or proof.excused.equal:
        return ""
    return " and ".join(CONTROLS[kind] for kind in proof.control) or "rounding"


def _measure(precision: str) -> str:
    relative = "" if precision == "fp64" else ", relative to its update"
    return f"largest difference of a parameter{relative}"


def _parameter_error(rank: Verify, precision: str) -> float:
    exact = precision == "fp64"
    return float(rank.parameter_error if exact else rank.parameter_error_of_update)


def _buffers(ranks: Sequence[Verify], tolerance: float) -> dict[str, float]:
    """Buffers that differ from one device's, with the largest difference on any rank."""
    found: dict[str, float] = {}
    for rank in ranks:
        for name, error in rank.buffer_errors.items():
            found[name] = _largest([found.get(name, 0.0), float(error)])
    return {name: error for name, error in found.items() if not error <= tolerance}


def _cause(
    ranks: Sequence[Verify],
    differences: dict[str, float],
    buffers: dict[str, float],
    loss_errors: list[float],
    tolerance: float,
    split_problem: str | None,
) -> str:
    """Why the trainings differ; what is certain comes first."""
    first = ranks[0]
    if found := split_problem or _serious(ranks, differences):
        return found
    factor, residual = float(first.gradient_factor), float(first.gradient_residual)
    if abs(factor - 1.0) > 1e-3 and residual < 1e-4:
        return (
            f"wrong scale: {factor:.4g} × the single device's gradient in the first step, so the "
            "loss of a part is not weighted by its share of the batch"
        )
    if loss_errors and loss_errors[0] > tolerance:
        return (
            "the loss of the first step already differs: other samples, other weights of the "
            "parts, or another forward pass"
        )
    if differences["gradients"] > tolerance:
        return (
            "the gradients of the first step differ, the loss does not: the gradients of the parts "
            "are not added up correctly"
        )
    extra = sorted({name for rank in ranks for name in rank.extra_gradients})
    if extra:
        return (
            f"{', '.join(extra[:3])} get a zero gradient instead of none, so weight decay or "
            "momentum moves them"
        )
    late = next((step for step, error in enumerate(loss_errors) if error > tolerance), None)
    if late is not None:
        return (
            f"the first step is equal; from step {late} on the losses differ "
            "(data, partial batches, optimizer, state)"
        )
    if differences["parameters"] > tolerance:
        return (
            f"the losses of all {len(loss_errors)} steps are equal, but {first.worst_parameter} is "
            "not (optimizer, unused parameters)"
        )
    worst = max(buffers, key=lambda name: buffers[name])
    return f"the parameters are equal, but the buffer {worst} differs by {buffers[worst]:.2g}"


def _serious(ranks: Sequence[Verify], differences: dict[str, float]) -> str | None:
    """What is a mistake whatever else is wrong."""
    if any(not math.isfinite(value) for name, value in differences.items() if name != "buffers"):
        return "a loss, gradient or parameter is not finite"
    missing = sorted({name for rank in ranks for name in rank.missing_gradients})
    if missing:
        return f"no gradient for {', '.join(missing[:3])}: the loss does not reach these parameters"
    if left := _uncompared(ranks):
        return f"no rank holds {plural(left, 'parameter')}, so they were not compared"
    if _diverged(ranks):
        return (
            f"missing synchronization: after training, the {len(ranks)} ranks hold different "
            "parameters"
        )
    return None


def _diverged(ranks: Sequence[Verify]) -> bool:
    """Do ranks that hold the same parameters (all of them, or those of one stage) end with
    different ones?"""
    return len({(rank.stage, rank.digest) for rank in ranks}) > len({rank.stage for rank in ranks})


def _uncompared(ranks: Sequence[Verify]) -> int:
    """Parameters of the reference that no rank has compared."""
    held = {rank.stage: rank.compared for rank in ranks if rank.compared is not None}
    return max(0, ranks[0].of - sum(held.values())) if held else 0


def _largest(values: Iterable[float]) -> float:
    """The maximum; one NaN makes it NaN."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def outcome(proof: Verification) -> str:
    """`equal`, `equal apart from BatchNorm`, `DIFFERS`."""
    if not proof.equal:
        return "DIFFERS"
    return f"equal apart from {reason}" if (reason := apart_from(proof)) else "equal"


def size_of(difference: float | None) -> str:
    return "–" if difference is None else f"{difference:.1e}"


def headline(result: VerifyResult) -> str:
    """`48 of 54 configurations train like one device …; 6 did not run`: all are counted."""
    ran, skipped = result.configurations, result.skipped
    equal = [each for each in ran if each.equal]
    apart = [each for each in equal if apart_from(each)]
    total = plural(len(ran) + len(skipped), "configuration")
    text = (
        f"{len(equal)} of {total} train like one device over {plural(result.steps, 'step')} "
        f"({result.precision}, {ran[0].measure} within {ran[0].tolerance:g})"
    )
    if apart:
        text += f"; {len(apart)} of these only with a known difference held fixed (see below)"
    if len(equal) < len(ran):
        verb = "differs" if len(ran) - len(equal) == 1 else "differ"
        text += f"; {len(ran) - len(equal)} {verb}"
    return text + (f"; {len(skipped)} did not run" if skipped else "")


def skipped_by_reason(result: VerifyResult) -> list[tuple[str, int, str]]:
    """(strategies, number of configurations, reason): each reason once."""
    by_reason: dict[str, list[str]] = {}
    for each in result.skipped:
        schedule = f" --schedule {each.options.schedule}" if each.options.schedule else ""
        by_reason.setdefault(each.reason, []).append(each.strategy + schedule)
    return [
        (", ".join(dict.fromkeys(names)), len(names), reason) for reason, names in by_reason.items()
    ]
