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

from msgspec.structs import replace

from paralab.analyse.verify import Excuse, Verification
from paralab.plan.plan import Plan
from paralab.record.events import Verify
from paralab.units import plural

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "tf32": 1e-5, "bf16": 1e-5, "fp16": 1e-5}
# How much rounding may change the first step's gradients, relative to the largest gradient.
ROUNDING = {"fp64": 1e-10, "fp32": 1e-4, "tf32": 0.1, "bf16": 0.5, "fp16": 0.5}


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
        cause=error,
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
