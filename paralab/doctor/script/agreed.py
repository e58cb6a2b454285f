"""What a collective has made the same on all ranks. `dist.all_reduce(x)` changes x where it stands: x counts as agreed on."""

from __future__ import annotations

from paralab.doctor.script.values import Call, Items, Value, options

# Collectives after which one of their arguments holds the same on all ranks (reduce and gather: on one of them).
_AGREED = {
    "torch.distributed.all_reduce": 0,
    "torch.distributed.all_reduce_coalesced": 0,
    "torch.distributed.all_gather": 0,
    "torch.distributed.all_gather_object": 0,
    "torch.distributed.all_gather_into_tensor": 0,
    "torch.distributed.broadcast": 0,
    "torch.distributed.broadcast_object_list": 0,
    "torch.distributed.scatter_object_list": 0,
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
        option.known["agreed"] = True
        for item in option.items if isinstance(option, Items) else ():
            item.known["agreed"] = True


def is_agreed(value: Value) -> bool:
    """Is it, or on some way what it may be, the same on all ranks? To be asked after the run."""
    if "is agreed" not in value.known:
        value.known["is agreed"] = "agreed" in value.known or any("agreed" in option.known for option in options(value))
    return bool(value.known["is agreed"])
