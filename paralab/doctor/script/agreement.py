"""What ranks agree on: values that a collective has made the same everywhere, and values that each
rank has for itself.

A loss is a rank's own until it was all-reduced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from paralab.doctor.script.agreed import is_agreed
from paralab.doctor.script.naming import COLLECTIVES, DDP, LOADER
from paralab.doctor.script.questions import (
    UNKNOWN,
    comes_from,
    depends_on_rank,
    is_forward,
    never,
    on_rank,
    roles,
    sources,
    under,
)
from paralab.doctor.script.reading import Script
from paralab.doctor.script.remembering import remembered
from paralab.doctor.script.values import (
    Attr,
    Call,
    Choice,
    Computed,
    Constant,
    Entered,
    Function,
    Happening,
    Made,
    Value,
)

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
    """Asks for one rule. `clocks`: does a clock count as a rank's own?"""

    def __init__(self) -> None:
        self._comes: dict[Value, bool] = {}  # answers that were given before
        self._nobodys: dict[bool, set[Value]] = {
            True: set(),
            False: set(),
        }  # with clocks and without

    def comes_from_agreed(self, value: Value) -> bool:
        """Somewhere on its way it was the same on all ranks."""
        walked: list[Value] = []
        for origin in walk(value, lambda passed: self._comes.get(passed) is False):
            if self._comes.get(origin) or is_agreed(origin):
                self._comes[value] = True
                return True
            walked.append(origin)
        self._comes.update(
            dict.fromkeys(walked, False)
        )  # what comes from nothing of the kind has no such origin either
        return False

    def own(self, value: Value, clocks: bool = False) -> Value | None:
        """Where it became each rank's own: a batch, an output of the model, a clock. None if ranks
        agree, or nothing is known."""
        nobodys = self._nobodys[clocks]
        seen: set[Value] = set()
        waiting = deque([value])
        while waiting:
            current = waiting.popleft()
            if current in seen or current in nobodys or is_agreed(current):
                continue
            seen.add(current)
            if self._is_source(current, clocks):
                return current
            if isinstance(current, Choice):
                ways = live(current)
                if not any(self.comes_from_agreed(way) for way in ways):
                    waiting.extend((*ways, *(current.tests if len(ways) > 1 else ())))
            elif not _is_count(current) and not _is_mapped(current):
                waiting.extend(current.parents)
        nobodys |= seen
        return None

    def _is_source(self, value: Value, clocks: bool) -> bool:
        if isinstance(value, Made):
            return (is_forward(value.call) and not _is_of_the_same_data(value.call)) or (
                clocks and value.call.target in _CLOCKS
            )
        loaders = [parent for parent in value.parents if "loader" in roles(parent)]
        fixed = [
            each
            for each in loaders
            if isinstance(each, Made) and _is_the_same_everywhere(each.call)
        ]
        return isinstance(value, Computed) and value.op == "Item" and len(loaders) > len(fixed)


def _is_count(value: Value) -> bool:
    return (isinstance(value, Made) and value.call.target in _COUNTS) or (
        isinstance(value, Attr) and value.name in ("shape", "ndim")
    )


def _is_of_the_same_data(forward: Call) -> bool:
    """Every rank evaluates the same batches, with the same weights."""
    loaders = [
        call for argument in forward.args for call in sources(argument) if call.target == LOADER
    ]
    return (
        under(forward, "no_grad") is not None
        and bool(loaders)
        and all(map(_is_the_same_everywhere, loaders))
    )


def _is_the_same_everywhere(loader: Call) -> bool:
    """A DataLoader in a fixed order, of data in which the rank plays no part."""
    return not {"shuffle", "sampler", "batch_sampler", "**"} & set(
        loader.keywords
    ) and not comes_from(loader.result, "rank")


def _is_mapped(value: Value) -> bool:
    """`map(together, (count, total))`: a function of the script that was not followed, and may ask
    the other ranks."""
    return (
        isinstance(value, Made)
        and value.call.target == "builtins.map"
        and isinstance(value.call.args[0], Function)
    )


def live(choice: Choice) -> tuple[Value, ...]:
    """The options that a job of several ranks can take: not what stands under `if not
    dist.is_initialized()`."""
    if len(choice.tests) == 1 and len(choice.options) == 2 and not depends_on_rank(choice.tests[0]):
        way = on_rank(choice.tests[0], 0)
        if way is not UNKNOWN:
            return (choice.options[0 if way else 1],)
    return choice.options


def walk(value: Value, skip: Callable[[Value], bool] = lambda value: False) -> Iterator[Value]:
    """The value and what it was computed from, along the ways that a job of several ranks takes;
    without what `skip` says."""
    seen: set[Value] = set()
    waiting = deque([value])
    while waiting:
        current = waiting.popleft()
        if current not in seen and not skip(current):
            seen.add(current)
            yield current
            waiting.extend(
                (*live(current), *current.tests) if isinstance(current, Choice) else current.parents
            )


def is_collective(call: Call) -> bool:
    """A collective of all ranks. One with a group of its own is the business of that group."""
    if call.target not in COLLECTIVES or call.target.endswith("new_group") or never(call):
        return False
    group = call.argument(_GROUP.get(call.method, 99), "group")
    return group is None or (isinstance(group, Constant) and group.value is None)


def synchronizes(call: Call) -> bool:
    """Ranks wait for each other here: a collective, the making of a DDP model, a backward through
    one."""
    return is_collective(call) or call.target == DDP or is_ddp_backward(call)


@remembered
def is_ddp_backward(call: Call) -> bool:
    if call.method != "backward":
        return False
    return any(
        comes_from(value, "ddp") for value in (call.receiver, *call.args) if value is not None
    )


def in_a_job(script: Script) -> bool:
    """Does the script itself start a process group or wrap a model in DDP? What Accelerate or
    Fabric do is left to them."""
    return any(True for _ in script.calls_of("torch.distributed.init_process_group", DDP))


def is_alone(happening: Happening) -> bool:
    """In a function that nothing in the script calls."""
    return (
        bool(happening.context)
        and isinstance(happening.context[0], Entered)
        and happening.context[0].call is None
    )
