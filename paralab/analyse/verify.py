"""Is it the same training? The verdict on one case, from what its ranks measured against the
single-device reference.

    fp64   every parameter within 1e-10 of the single device's
    fp32   every parameter within 1e-5 of its update: norm of the difference over norm of the tensor's update
           (or of a typical tensor's update, where that is larger: sums that cancel keep the rounding of their terms)

Losses, buffers and the gradients of the first step are held to the same tolerance, relative to
their size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from paralab.record.reader import Event

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "tf32": 1e-5, "bf16": 1e-5, "fp16": 1e-5}
# How far rounding may move the gradients of the first step, relative to the largest gradient.
ROUNDING = {"fp64": 1e-10, "fp32": 1e-4, "tf32": 0.1, "bf16": 0.5, "fp16": 0.5}


def judge(
    plan: dict[str, Any], ranks: list[Event], split_problem: str | None = None
) -> dict[str, Any]:
    """The numbers, whether they are equal, and the cause where they are not.

    `split_problem` is what a single device found wrong with the loss or the model."""
    precision = plan["precision"]
    tolerance = TOLERANCE[precision]
    measure = "parameter_error" if precision == "fp64" else "parameter_error_of_update"
    parameters = _largest(_number(rank[measure]) for rank in ranks)
    gradients = _largest(
        _number(rank["gradient_error"]) / (_number(rank["gradient_size"]) or 1.0) for rank in ranks
    )
    losses = [
        sum(_number(rank["losses"][step]) for rank in ranks)
        for step in range(len(ranks[0]["losses"]))
    ]
    reference = [_number(loss) for loss in ranks[0]["reference_losses"]]
    loss_errors = [
        abs(mine - theirs) / max(1.0, abs(theirs))
        for mine, theirs in zip(losses, reference, strict=True)
    ]
    buffers = _buffers(ranks, tolerance)
    differences = {
        "parameters": parameters,
        "gradients": gradients,
        "losses": _largest(loss_errors),
        "buffers": _largest(buffers.values()),
    }
    same = not _apart(ranks) and not _uncompared(ranks)
    equal = all(value <= tolerance for value in differences.values()) and same
    return {
        "equal": equal,
        "steps": len(losses),
        "max_difference": _plain(parameters),
        "gradient_difference": _plain(gradients),
        "loss_difference": _plain(differences["losses"]),
        "buffers": {name: _plain(value) for name, value in buffers.items()},
        "tolerance": tolerance,
        "measure": _measure(precision),
        "worst_parameter": max(ranks, key=lambda rank: _number(rank[measure]))["worst_parameter"],
        "cause": None
        if equal
        else _cause(ranks, differences, buffers, loss_errors, tolerance, split_problem),
        "serious": _serious(ranks, differences) is not None,
    }


def failed_case(plan: dict[str, Any], error: str) -> dict[str, Any]:
    """The verdict on a case that did not come to its end."""
    unknown = dict.fromkeys(
        ("max_difference", "gradient_difference", "loss_difference", "worst_parameter")
    )
    known = {"tolerance": TOLERANCE[plan["precision"]], "measure": _measure(plan["precision"])}
    return (
        {"equal": False, "steps": 0, "buffers": {}, "serious": True}
        | unknown
        | known
        | {"cause": f"it failed: {error}"}
    )


def with_excuse(
    proof: dict[str, Any], plan: dict[str, Any], asked: dict[str, Any] | None
) -> dict[str, Any]:
    """The verdict on a case that differs from one device for a known reason.

    `proof` was run with the reason removed and decides the verdict; `asked` was run as requested
    and gives the size of the difference. An excuse covers only what it explains: see
    `_inexcusable`."""
    if asked is None:
        return proof | {"excused": None}
    names = (
        "equal",
        "max_difference",
        "gradient_difference",
        "loss_difference",
        "buffers",
        "tolerance",
        "measure",
    )
    excused = {"reasons": list(plan["differences"])} | {name: asked[name] for name in names}
    problem = _inexcusable(proof, plan, asked)
    if proof["equal"] and problem:
        proof = proof | {"equal": False, "cause": problem}
    return proof | {"excused": excused}


def _inexcusable(proof: dict[str, Any], plan: dict[str, Any], asked: dict[str, Any]) -> str | None:
    """What no known reason explains: a failed run, ranks with different parameters, gradients
    beyond rounding."""
    if asked["serious"]:
        return f"as asked ({plan['precision']}), {asked['cause']}"
    gradients, limit = asked["gradient_difference"], ROUNDING[plan["precision"]]
    if not proof["control"] and gradients is not None and gradients > limit:
        return (
            f"in {plan['precision']} the gradients of the first step differ by {gradients:.2g}, more than rounding explains. "
            "In fp64 they are equal, so the forward depends on the precision"
        )
    return None


ASIDE = {"batch_norm": "BatchNorm", "random": "random numbers", "state": "what its forward changes"}


def aside(proof: dict[str, Any]) -> str:
    """`BatchNorm and random numbers`: what the proof held fixed, if it makes a difference; empty
    otherwise."""
    excused = proof.get("excused")
    if not excused or excused["equal"]:
        return ""
    return " and ".join(ASIDE[kind] for kind in proof["control"]) or "rounding"


def _measure(precision: str) -> str:
    return "largest difference of a parameter" + (
        "" if precision == "fp64" else ", relative to its update"
    )


def _buffers(ranks: list[Event], tolerance: float) -> dict[str, float]:
    """Buffers that are not as on one device, each with its largest difference on any rank."""
    found: dict[str, float] = {}
    for rank in ranks:
        for name, error in rank.get("buffer_errors", {}).items():
            found[name] = _largest([found.get(name, 0.0), _number(error)])
    return {name: error for name, error in found.items() if not error <= tolerance}


def _cause(
    ranks: list[Event],
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
    factor, residual = _number(first["gradient_factor"]), _number(first["gradient_residual"])
    if abs(factor - 1.0) > 1e-3 and residual < 1e-4:
        number = f"{factor:.4g} × the single device's gradient in the first step"
        return f"wrong scale: {number}, so the loss of a part is not weighted by its share of the batch"
    if loss_errors and loss_errors[0] > tolerance:
        return "the loss of the first step differs already: other samples, other weights of the parts, or another forward pass"
    if differences["gradients"] > tolerance:
        return "the gradients of the first step differ, the loss does not: the gradients of the parts are not added up correctly"
    extra = sorted({name for rank in ranks for name in rank.get("extra_gradients", [])})
    if extra:
        return f"{', '.join(extra[:3])} get a zero gradient instead of none, so weight decay or momentum moves them"
    late = next((step for step, error in enumerate(loss_errors) if error > tolerance), None)
    if late is not None:
        return f"the first step is equal; from step {late} on the losses differ (data, partial batches, optimizer, state)"
    if differences["parameters"] > tolerance:
        steps, name = len(loss_errors), first["worst_parameter"]
        return f"the losses of all {steps} steps are equal, but {name} is not (optimizer, unused parameters)"
    worst = max(buffers, key=lambda name: buffers[name])
    return f"the parameters are equal, but the buffer {worst} differs by {buffers[worst]:.2g}"


def _serious(ranks: list[Event], differences: dict[str, float]) -> str | None:
    """What is a mistake whatever else is the matter."""
    if any(not math.isfinite(value) for name, value in differences.items() if name != "buffers"):
        return "a loss, gradient or parameter is not finite"
    missing = sorted({name for rank in ranks for name in rank["missing_gradients"]})
    if missing:
        return f"no gradient for {', '.join(missing[:3])}: the loss does not reach these parameters"
    if left := _uncompared(ranks):
        return f"{left} parameters are held by no rank, and were not compared"
    if _apart(ranks):
        return f"missing synchronization: after training, the {len(ranks)} ranks hold different parameters"
    return None


def _apart(ranks: list[Event]) -> bool:
    """Do ranks that hold the same parameters (all of them, or those of one stage) end with
    different ones?"""
    return len({(rank.get("stage"), rank["digest"]) for rank in ranks}) > len(
        {rank.get("stage") for rank in ranks}
    )


def _uncompared(ranks: list[Event]) -> int:
    """Parameters of the reference that no rank has compared."""
    held = {rank.get("stage"): rank["compared"] for rank in ranks if "compared" in rank}
    return max(0, ranks[0]["of"] - sum(held.values())) if held else 0


def _largest(values: Iterable[float]) -> float:
    """The maximum, in which a NaN is not lost."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def _number(value: float | str) -> float:
    return float(value)


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
