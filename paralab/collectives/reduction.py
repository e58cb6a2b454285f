"""Combine the values of all ranks, always in rank order, so that the result is bitwise identical in
every run and on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Combine = Callable[..., torch.Tensor]
LOW = (torch.float16, torch.bfloat16)
FUNCTIONS: dict[str, Combine] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
BOOLEAN = {"SUM": "MAX", "PRODUCT": "MIN"}
DTYPES = (
    *LOW,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)


def can_reduce(operator: str, dtype: torch.dtype) -> bool:
    if operator not in FUNCTIONS or dtype not in DTYPES:
        return False
    if operator.startswith("B"):
        return not dtype.is_floating_point
    return not (operator == "AVG" and dtype == torch.bool)


def reduce_in_order(values: Sequence[torch.Tensor], operator: str, out: torch.Tensor) -> None:
    """Write the combined values to `out`. `out` may be one of the inputs only if it is the
    first."""
    if out.dtype == torch.bool:
        operator = BOOLEAN.get(operator, operator)
        if operator in ("MAX", "MIN"):
            operator = "BOR" if operator == "MAX" else "BAND"
    combine = FUNCTIONS[operator]
    if len(values) == 1:
        out.copy_(values[0])
        return
    if out.dtype in LOW and len(values) > 2:
        # Round once at the end, not after each rank.
        total = values[0].float()
        for value in values[1:]:
            combine(total, value.float(), out=total)
        out.copy_(total / len(values) if operator == "AVG" else total)
        return

    combine(values[0], values[1], out=out)
    for value in values[2:]:
        combine(out, value, out=out)
    if operator == "AVG":
        if out.dtype.is_floating_point:
            out.div_(len(values))
        else:
            out.div_(len(values), rounding_mode="trunc")
