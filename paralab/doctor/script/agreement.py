"""What ranks agree on: values that a collective has made the same everywhere, and values that each rank has for itself.

A loss is a rank's own until it was all-reduced. `dist.all_reduce(x)` changes x where it stands: x counts as agreed on.
"""

from __future__ import annotations

from functools import lru_cache

from paralab.doctor.script.naming import COLLECTIVES, DDP
from paralab.doctor.script.questions import UNKNOWN, comes_from, depends_on_rank, is_forward, on_rank, roles
from paralab.doctor.script.reading import Script
from paralab.doctor.script.values import Attr, Call, Choice, Computed, Constant, Entered, Happening, Items, Made, Value, options

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
# Where the group stands among the arguments.
_GROUP = {
    "barrier": 0,
    "all_reduce": 2,
    "broadcast": 2,
    "all_gather": 2,
    "all_gather_object": 2,
    "reduce": 3,
    "gather": 3,
    "scatter": 3,
}
# How many samples a batch has is the same on all ranks, but for the last batch.
_COUNTS = ("builtins.len", "?.size", "?.numel", "?.dim", "?.element_size")
_CLOCKS = ("time.time", "time.perf_counter", "time.monotonic")


class Agreement:
    """Asks for one script. `clocks`: does a clock count as a rank's own?"""

    def __init__(self, script: Script) -> None:
        self.agreed: set[int] = set()
        for call in script.calls:
            if call.target in _AGREED:
                given = call.argument(_AGREED[call.target], "tensor")
                self._add(given)
            elif any(word in call.method.lower() for word in ("all_reduce", "allreduce", "all_gather", "gather_for_metrics")):
                self._add(call.result)

    def _add(self, value: Value | None) -> None:
        for option in options(value) if value else ():
            self.agreed.add(id(option))
            for item in option.items if isinstance(option, Items) else ():
                self.agreed.add(id(item))

    def is_agreed(self, value: Value) -> bool:
        return any(id(option) in self.agreed for option in options(value))

    def comes_from_agreed(self, value: Value) -> bool:
        """Somewhere on its way it was the same on all ranks."""
        return any(self.is_agreed(origin) for origin in walk(value))

    def own(self, value: Value, clocks: bool = False) -> Value | None:
        """Where it became each rank's own: a batch, an output of the model, a clock. None if ranks agree, or nothing is known."""
        seen: set[int] = set()
        waiting = [value]
        while waiting:
            current = waiting.pop(0)
            if id(current) in seen or self.is_agreed(current):
                continue
            seen.add(id(current))
            if self._is_source(current, clocks):
                return current
            if isinstance(current, Choice):
                ways = live(current)
                if not any(self.comes_from_agreed(way) for way in ways):
                    waiting.extend((*ways, *(current.tests if len(ways) > 1 else ())))
            elif not _is_count(current):
                waiting.extend(current.parents)
        return None

    def _is_source(self, value: Value, clocks: bool) -> bool:
        if isinstance(value, Made):
            return is_forward(value.call) or (clocks and value.call.target in _CLOCKS)
        return isinstance(value, Computed) and value.op == "Item" and any("loader" in roles(parent) for parent in value.parents)


def _is_count(value: Value) -> bool:
    return (isinstance(value, Made) and value.call.target in _COUNTS) or (
        isinstance(value, Attr) and value.name in ("shape", "ndim")
    )


def live(choice: Choice) -> tuple[Value, ...]:
    """The options that a job of several ranks can take: not what stands under `if not dist.is_initialized()`."""
    if len(choice.tests) == 1 and len(choice.options) == 2 and not depends_on_rank(choice.tests[0]):
        way = on_rank(choice.tests[0], 0)
        if way is not UNKNOWN:
            return (choice.options[0 if way else 1],)
    return choice.options


def walk(value: Value) -> list[Value]:
    """The value and what it was computed from, along the ways that a job of several ranks takes."""
    found: dict[int, Value] = {}
    waiting = [value]
    while waiting:
        current = waiting.pop(0)
        if id(current) not in found:
            found[id(current)] = current
            waiting.extend((*live(current), *current.tests) if isinstance(current, Choice) else current.parents)
    return list(found.values())


def is_collective(call: Call) -> bool:
    """A collective of all ranks. One with a group of its own is the business of that group."""
    if call.target not in COLLECTIVES or call.target.endswith("new_group"):
        return False
    group = call.argument(_GROUP.get(call.method, 99), "group")
    return group is None or (isinstance(group, Constant) and group.value is None)


def synchronises(call: Call) -> bool:
    """Ranks wait for each other here: a collective, the making of a DDP model, a backward through one."""
    return is_collective(call) or call.target == DDP or is_ddp_backward(call)


@lru_cache(maxsize=100_000)
def is_ddp_backward(call: Call) -> bool:
    if call.method != "backward":
        return False
    return any(comes_from(value, "ddp") for value in (call.receiver, *call.args) if value is not None)


def in_a_job(script: Script) -> bool:
    """Does the script itself start a process group or wrap a model in DDP? What Accelerate or Fabric do is left to them."""
    return any(True for _ in script.calls_of("torch.distributed.init_process_group", DDP))


def is_alone(happening: Happening) -> bool:
    """In a function that nothing in the script calls."""
    return bool(happening.context) and isinstance(happening.context[0], Entered) and happening.context[0].call is None
