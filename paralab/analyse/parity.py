"""Is it the same training? The verdict on one case, from what its ranks measured against the single-device reference.

    fp64   every parameter within 1e-10 of the single device's
    fp32   every parameter within 1e-5 of its update: norm of the difference over norm of the tensor's update
           (or of a typical tensor's update, where that is larger: sums that cancel keep the rounding of their terms)

Losses and the gradients of the first step are held to the same tolerance, relative to their size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from paralab.record.reader import Event

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "tf32": 1e-5, "bf16": 1e-5, "fp16": 1e-5}


def judge(plan: dict[str, Any], ranks: list[Event]) -> dict[str, Any]:
    """The numbers, whether they are equal, and the cause where they are not."""
    precision = plan["precision"]
    tolerance = TOLERANCE[precision]
    measure = "parameter_error" if precision == "fp64" else "parameter_error_of_update"
    parameters = _largest(_number(rank[measure]) for rank in ranks)
    gradients = _largest(_number(rank["gradient_error"]) / (_number(rank["gradient_size"]) or 1.0) for rank in ranks)
    losses = [sum(_number(rank["losses"][step]) for rank in ranks) for step in range(len(ranks[0]["losses"]))]
    reference = [_number(loss) for loss in ranks[0]["reference_losses"]]
    loss_errors = [abs(mine - theirs) / max(1.0, abs(theirs)) for mine, theirs in zip(losses, reference, strict=True)]
    loss = _largest(loss_errors)
    differences = {"parameters": parameters, "gradients": gradients, "losses": loss}
    same = not _apart(ranks) and not _uncompared(ranks)
    equal = all(value <= tolerance for value in differences.values()) and same
    cause, legitimate = (None, False) if equal else _cause(plan, ranks, differences, loss_errors, tolerance)
    return {
        "equal": equal,
        "legitimate": legitimate,
        "max_difference": _plain(parameters),
        "gradient_difference": _plain(gradients),
        "loss_difference": _plain(loss),
        "tolerance": tolerance,
        "measure": _measure(precision),
        "worst_parameter": max(ranks, key=lambda rank: _number(rank[measure]))["worst_parameter"],
        "cause": cause,
    }


def failed_case(plan: dict[str, Any], error: str) -> dict[str, Any]:
    """The verdict on a case that did not come to its end."""
    unknown = dict.fromkeys(("max_difference", "gradient_difference", "loss_difference", "worst_parameter"))
    verdict = {
        "equal": False,
        "legitimate": False,
        "tolerance": TOLERANCE[plan["precision"]],
        "measure": _measure(plan["precision"]),
    }
    return unknown | verdict | {"cause": f"it failed: {error}"}


def _measure(precision: str) -> str:
    return "largest difference of a parameter" + ("" if precision == "fp64" else ", relative to its update")


def _cause(
    plan: dict[str, Any],
    ranks: list[Event],
    differences: dict[str, float],
    loss_errors: list[float],
    tolerance: float,
) -> tuple[str, bool]:
    """(why the trainings differ, whether that was to be expected). What can only be a mistake is looked for first."""
    first = ranks[0]
    if any(not math.isfinite(value) for value in differences.values()):
        return "a loss, gradient or parameter is not finite", False
    missing = sorted({name for rank in ranks for name in rank["missing_gradients"]})
    if missing:
        return f"no gradient for {', '.join(missing[:3])}: the loss does not reach these parameters", False
    if left := _uncompared(ranks):
        return f"{left} parameters are held by no rank, and were not compared", False
    if _apart(ranks):
        return f"missing synchronisation: after training, the {len(ranks)} ranks hold different parameters", False
    factor, residual = _number(first["gradient_factor"]), _number(first["gradient_residual"])
    if abs(factor - 1.0) > 1e-3 and residual < 1e-4:
        number = f"{factor:.4g} × the single device's gradient in the first step"
        return f"wrong scale: {number}, so the loss of a part is not weighted by its share of the batch", False
    if plan["differences"]:
        return "; ".join(plan["differences"]), True
    if differences["gradients"] <= tolerance and loss_errors and loss_errors[0] <= tolerance:
        late = next((step for step, error in enumerate(loss_errors) if error > tolerance), len(loss_errors))
        return (
            f"the first step is equal; from step {late} on the trainings part (data, weights of a partial batch, optimiser)",
            False,
        )
    if loss_errors and loss_errors[0] > tolerance:
        return (
            "the loss of the first step differs already: other samples, other weights of the parts, or another forward pass",
            False,
        )
    return "the gradients of the first step differ, the loss does not: the gradients of the parts are not added up correctly", False


def _apart(ranks: list[Event]) -> bool:
    """Do ranks that hold the same parameters (all of them, or those of one stage) end with different ones?"""
    return len({(rank.get("stage"), rank["digest"]) for rank in ranks}) > len({rank.get("stage") for rank in ranks})


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
