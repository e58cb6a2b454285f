"""What a collective has made the same on all ranks. `dist.all_reduce(x)` changes x where it stands:
x counts as agreed on."""

from __future__ import annotations

from paralab.doctor.script.values import (
    Call,
    Choice,
    Computed,
    Items,
    Made,
    Mapping,
    Value,
    options,
)

# Collectives after which one of their arguments holds the same on all ranks (reduce and gather: on
# one of them).
_AGREED = {
    "torch.distributed.all_reduce": 0,
    "torch.distributed.all_reduce_coalesced": 0,
    "torch.distributed.all_gather": 0,
    "torch.distributed.all_gather_object": 0,
    "torch.distributed.all_gather_into_tensor": 0,
    "torch.distributed.broadcast": 0,
    "torch.distributed.broadcast_object_list": 0,
    "torch.distributed.scatter_object_list": 0,
    "torch.distributed.all_to_all": 0,  # not the same, but of all ranks: what is made of it may be
    "torch.distributed.all_to_all_single": 0,
    "torch.distributed.reduce": 0,
    "torch.distributed.gather": 1,
    "torch.distributed.gather_object": 1,
}
_WORDS = ("all_reduce", "allreduce", "all_gather", "gather_for_metrics")


def mark(call: Call) -> None:
    """Remember what this call has made the same on all ranks, if it is a collective."""
    if call.target in _AGREED:
        _mark(call.argument(_AGREED[call.target], "tensor"))
    elif any(word in call.method.lower() for word in _WORDS):
        _mark(call.result)


def _mark(value: Value | None) -> None:
    for option in options(value) if value else ():
        for each in (
            option,
            *_parts(option),
            *(part for over in _gone_over(option) for part in _parts(over)),
        ):
            each.known["agreed"] = True


def _parts(value: Value) -> tuple[Value, ...]:
    return (
        value.items
        if isinstance(value, Items)
        else tuple(value.entries.values())
        if isinstance(value, Mapping)
        else ()
    )


def _gone_over(value: Value) -> tuple[Value, ...]:
    """`for x in (a, b)`, `for x in sums.values()`, `sums[name]`: each of them, one after the
    other."""
    if not isinstance(value, Computed) or value.op not in ("Item", "Index"):
        return ()
    return tuple(
        over.call.receiver or over if isinstance(over, Made) else over for over in value.parents
    )


def is_agreed(value: Value) -> bool:
    """Is it, or on some way what it may be, the same on all ranks? To be asked after the run."""
    if "is agreed" not in value.known:
        ways = value.options if isinstance(value, Choice) else ()
        value.known["is agreed"] = "agreed" in value.known or any(map(is_agreed, ways))
    return bool(value.known["is agreed"])
