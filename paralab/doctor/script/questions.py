"""Questions that rules ask about values: what part does it play, what was it computed from, does it
differ between ranks."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from paralab.doctor.script.agreed import is_agreed
from paralab.doctor.script.calls import library_base
from paralab.doctor.script.naming import RANK_NAMES, role_of_made
from paralab.doctor.script.remembering import remembered
from paralab.doctor.script.values import (
    DEEPEST,
    Attr,
    Branch,
    Call,
    Choice,
    Class,
    Computed,
    Constant,
    Dotted,
    Happening,
    Items,
    Loop,
    Made,
    Mapping,
    Object,
    Parameter,
    Value,
    With,
    options,
)

RANK_VARIABLES = {
    "RANK",
    "LOCAL_RANK",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
}
# A number stays what it is through these; through any other call of a library (torch.device) it
# becomes something else.
_TRANSPARENT = {
    "builtins.int",
    "builtins.str",
    "builtins.bool",
    "builtins.max",
    "builtins.min",
    "os.environ",
}
_THROUGH_LOOPS = (
    "builtins.enumerate",
    "builtins.zip",
    "builtins.iter",
    "builtins.range",
    "builtins.len",
    "tqdm",
    "itertools.",
)


def roles(value: Value | None) -> frozenset[str]:
    """The parts that a value may play: ddp, dp, fsdp, module, scaler, loader, sampler, dataset,
    iterable dataset, optimizer, scheduler, loss, autocast, no_sync, no_grad, rank, world, …"""
    if value is None:
        return frozenset()
    if "roles" not in value.known:
        value.known["roles"] = frozenset(
            role for option in options(value) for role in _roles(option)
        )
    found: frozenset[str] = value.known["roles"]
    return found


def _roles(value: Value) -> Iterator[str]:
    if isinstance(value, Made):
        yield from [role] if (role := role_of_made(value.call.target)) else []
        if value.call.target == "os.environ" and _variable(value.call) in RANK_VARIABLES:
            yield "rank"
        if value.call.target == "os.environ" and _variable(value.call) in (
            "WORLD_SIZE",
            "SLURM_NTASKS",
        ):
            yield "world"
        if value.call.target == "torch.multiprocessing.spawn.rank":
            yield "rank"
    elif isinstance(value, Object | Class):
        yield from _roles_of_class(value.of if isinstance(value, Object) else value)
    elif isinstance(value, Parameter | Attr) and value.name in RANK_NAMES:
        given = (
            isinstance(value, Parameter)
            or isinstance(value.base, Parameter)
            or bool(roles(value.base) & {"arguments"})
        )
        yield from ["rank"] if given else []


def _roles_of_class(of: Class) -> Iterator[str]:
    base = library_base(of)
    if base is None:
        return
    last = base.name.rpartition(".")[2]
    if base.name.startswith("torch.utils.data") or last in ("Dataset", "IterableDataset"):
        yield (
            "iterable dataset"
            if last == "IterableDataset"
            else "sampler-plain"
            if last.endswith("Sampler")
            else "dataset"
        )
    elif role := role_of_made(base.name):
        yield role


def _variable(call: Call) -> Any:
    return call.args[0].value if call.args and isinstance(call.args[0], Constant) else None


def origins(value: Value, stop: Callable[[Value], bool] = lambda value: False) -> Iterator[Value]:
    """The value and all that it was computed from, nearest first; not past what `stop` says."""
    seen = {id(value)}
    waiting = deque([value])
    while waiting:
        current = waiting.popleft()
        yield current
        if not stop(current):
            for parent in current.parents:
                if id(parent) not in seen:
                    seen.add(id(parent))
                    waiting.append(parent)


def sources(value: Value, stop: Callable[[Call], bool] = lambda call: False) -> Iterator[Call]:
    """The library's and modules' calls that a value was computed from, nearest first; not past what
    `stop` says."""
    made = (
        origin
        for origin in origins(value, lambda v: isinstance(v, Made) and stop(v.call))
        if isinstance(origin, Made)
    )
    yield from dict.fromkeys(origin.call for origin in made)


def comes_from(value: Value | None, role: str) -> bool:
    """Is the value computed from something that plays this part? To be asked after the run."""
    if value is None:
        return False
    if ("comes from", role) not in value.known:
        value.known["comes from", role] = any(role in roles(origin) for origin in origins(value))
    return bool(value.known["comes from", role])


def is_forward(call: Call) -> bool:
    """A call of a model: wrapped or not, not a loss."""
    return call.method in ("__call__", "forward") and bool(
        roles(call.receiver) & {"ddp", "dp", "fsdp", "module"}
    )


def depends_on_rank(value: Value | None) -> bool:
    """Does a test come out differently on different ranks? `torch.device(local_rank).type ==
    "cuda"` does not."""
    if value is None:
        return False

    if "depends on rank" not in value.known:
        value.known["depends on rank"] = False  # while it is asked for
        found = origins(value, _is_opaque)
        value.known["depends on rank"] = any(
            "rank" in roles(v) or depends_on_rank(v.known.get("last")) for v in found
        )
    return bool(value.known["depends on rank"])


def _is_opaque(value: Value) -> bool:
    if isinstance(value, Computed) and value.op in (
        "Item",
        "Count",
        "Part",
    ):  # `for x in bar if rank == 0 else loader`
        return isinstance(value.parents[0], Choice)
    if (
        isinstance(value, Computed) and value.op in _COMPARISONS
    ):  # `int(os.environ["LOCAL_RANK"]) != -1` is the same on all
        answers = [on_rank(value, rank) for rank in range(SEVERAL)]
        return UNKNOWN not in answers and len({bool(answer) for answer in answers}) == 1
    return (
        (isinstance(value, Made) and value.call.target not in _TRANSPARENT)
        or isinstance(value, Attr | Mapping)
        or "last" in value.known
    )


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge,
    "Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "FloorDiv": operator.floordiv, "Mod": operator.mod,
    "Div": operator.truediv, "Pow": operator.pow, "In": lambda a, b: a in b, "NotIn": lambda a, b: a not in b,
    "Is": operator.is_, "IsNot": operator.is_not,
}  # fmt: skip
_COMPARISONS = ("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE", "In", "NotIn")
UNKNOWN: Any = object()
SEVERAL = 4  # ranks, where a test asks how many there are


def on_rank(value: Value, rank: int, depth: int = 0) -> Any:
    """What a value is on a rank of a job of several, or UNKNOWN. Used for tests: `rank == 0`, `not
    is_main()`, `rank % 2`."""
    if isinstance(value, Constant):
        return value.value
    if depth > DEEPEST:
        return UNKNOWN
    if ("on rank", rank) not in value.known:
        value.known["on rank", rank] = _on_rank(value, rank, depth + 1)
    return value.known["on rank", rank]


def _on_rank(value: Value, rank: int, depth: int) -> Any:
    if isinstance(value, Items):
        return [on_rank(item, rank, depth) for item in value.items]
    if isinstance(value, Made) and value.call.target in (
        "torch.distributed.is_initialized",
        "torch.distributed.is_available",
    ):
        return True
    if "world" in roles(value):
        return SEVERAL
    if "rank" in roles(value) and not isinstance(value, Choice):
        return rank
    if (
        isinstance(value, Made)
        and value.call.target in ("builtins.int", "builtins.bool")
        and value.call.args
    ):
        return on_rank(value.call.args[0], rank, depth)
    if isinstance(value, Choice):
        found = {
            repr(on_rank(option, rank, depth)): on_rank(option, rank, depth)
            for option in value.options
        }
        found.pop(repr(UNKNOWN), None)
        if len(value.tests) == 1 and len(value.options) == 2:
            test = on_rank(value.tests[0], rank, depth)
            if test is not UNKNOWN:
                return on_rank(value.options[0 if test else 1], rank, depth)
        return next(iter(found.values())) if len(found) == 1 else UNKNOWN
    if isinstance(value, Computed):
        return _computed(value, rank, depth)
    return UNKNOWN


def _computed(value: Computed, rank: int, depth: int) -> Any:
    if value.op in ("In", "NotIn") and is_dotted(value.parents[-1], "os.environ"):
        asked = value.parents[0].value if isinstance(value.parents[0], Constant) else None
        return (value.op == "In") if asked in (*RANK_VARIABLES, "WORLD_SIZE") else UNKNOWN
    parts = [on_rank(parent, rank, depth) for parent in value.parents]
    if value.op in ("And", "Or"):
        deciding = value.op == "Or"
        if any(part is not UNKNOWN and bool(part) is deciding for part in parts):
            return deciding
        return UNKNOWN if UNKNOWN in parts else not deciding
    if UNKNOWN in parts:
        return UNKNOWN
    if value.op == "Not":
        return not parts[0]
    if value.op == "USub":
        return -parts[0]
    if value.op in ("Eq", "NotEq") and {type(part) for part in parts} == {
        int,
        str,
    }:  # os.environ["RANK"] == "0"
        parts = [str(part) for part in parts]
    try:
        return OPERATORS[value.op](*parts) if value.op in OPERATORS and len(parts) == 2 else UNKNOWN
    except (TypeError, ValueError, ArithmeticError):
        return UNKNOWN


def rank_branch(happening: Happening) -> Branch | None:
    """The innermost branch that only some ranks take and that this stands in."""
    return next((branch for branch in happening.inside(Branch) if _parts_ranks(branch)), None)


@remembered
def _parts_ranks(branch: Branch) -> bool:
    if not _comes_out_differently(branch.test):
        return False
    return is_of_each_rank(branch.test)


def is_of_each_rank(value: Value) -> bool:
    """Does it come from the rank, and not only through something that the ranks have agreed on?
    `stop` after a broadcast is the same everywhere, whoever sent it; `rank == best` is not,
    although `best` is. To be asked after the run."""
    found = [v for v in origins(value, lambda v: is_agreed(v) or _is_opaque(v)) if not is_agreed(v)]
    return any("rank" in roles(v) or depends_on_rank(v.known.get("last")) for v in found)


def _comes_out_differently(test: Value) -> bool:
    """`int(os.environ.get("RANK", -1)) != -1` asks for the rank, and all ranks give the same
    answer; so they do to `rank > -1 and epochs > 3`, whatever epochs is."""
    if not depends_on_rank(test):
        return False
    found = [on_rank(test, rank) for rank in range(SEVERAL)]
    joined = isinstance(test, Computed) and test.op in ("And", "Or", "Not")
    if UNKNOWN not in found and (
        len({bool(way) for way in found}) > 1 or not joined or _is_settled(test)
    ):
        return len({bool(way) for way in found}) > 1
    return not joined or any(_comes_out_differently(part) for part in test.parents)


def _is_settled(test: Value) -> bool:
    """Is it known on every way? A flag that is False here and something unknown there is not."""
    chosen = (
        option
        for origin in origins(test)
        if isinstance(origin, Choice)
        for option in origin.options
    )
    return all(on_rank(option, 0) is not UNKNOWN for option in chosen)


@remembered
def never(happening: Happening) -> bool:
    """In a branch that no rank of a job of several takes: `wait(rank=-1)` whose body is `if rank >
    0: barrier()`."""
    return any(_nobody_takes(branch) for branch in happening.inside(Branch))


@remembered
def _nobody_takes(branch: Branch) -> bool:
    found = [on_rank(branch.test, rank) for rank in range(SEVERAL)]
    return (
        UNKNOWN not in found
        and all(bool(way) is not branch.taken for way in found)
        and _is_settled(branch.test)
    )


def exclusive(one: Happening, other: Happening) -> bool:
    """On the two ways of one branch: never both."""
    ways = {id(branch.node): branch.taken for branch in one.inside(Branch)}
    return any(
        ways.get(id(branch.node), branch.taken) is not branch.taken
        for branch in other.inside(Branch)
    )


def who_takes(branch: Branch) -> str:
    """`rank 0 only`, `all ranks but 0`, or `only some ranks`."""
    taken = _taken(branch)
    if UNKNOWN in taken:
        taken = _if_it_is_the_rank(branch.test)
    if UNKNOWN in taken:
        return "only some ranks"
    ways = [bool(way) is branch.taken for way in taken]
    if ways == [True, False, False]:
        return "rank 0 only"
    return "all ranks but 0" if ways == [False, True, True] else "only some ranks"


def is_certain(branch: Branch) -> bool:
    """Does the test certainly come out differently on different ranks? `rank == options.chief` may
    be false on all of them."""
    return UNKNOWN not in _taken(branch)


def _taken(branch: Branch) -> list[Any]:
    """How the test comes out on the first ranks."""
    taken = [on_rank(branch.test, rank) for rank in (0, 1, 2)]
    if UNKNOWN in taken:
        # `dist.is_initialized() and rank != 0`: what else is asked does not differ between ranks
        parts = (
            branch.test.parents
            if isinstance(branch.test, Computed) and branch.test.op in ("And", "Or")
            else ()
        )
        deciding = [part for part in parts if depends_on_rank(part)]
        taken = [on_rank(deciding[0], rank) for rank in (0, 1, 2)] if len(deciding) == 1 else taken
    return taken


def _if_it_is_the_rank(test: Value) -> list[Any]:
    """How `number > 0` comes out on the first ranks if the number, which we cannot work out, is the
    rank."""
    sides = (
        test.parents
        if isinstance(test, Computed) and test.op in OPERATORS and len(test.parents) == 2
        else ()
    )
    compared = (
        on_rank(sides[1], 0)
        if sides and depends_on_rank(sides[0]) and not depends_on_rank(sides[1])
        else UNKNOWN
    )
    if (
        not isinstance(test, Computed)
        or not isinstance(compared, int | list | tuple)
        or (isinstance(compared, list) and UNKNOWN in compared)
    ):
        return [UNKNOWN]
    try:
        return [OPERATORS[test.op](rank, compared) for rank in (0, 1, 2)]
    except (TypeError, ArithmeticError):
        return [UNKNOWN]


def iterated(loop: Loop) -> Iterator[Value]:
    """What a loop goes over, seen through enumerate, zip, tqdm, range(len(…))."""

    def opaque(value: Value) -> bool:
        return isinstance(value, Made) and not value.call.target.startswith(_THROUGH_LOOPS)

    return origins(loop.over, opaque)


def loop_over(happening: Happening, role: str) -> Loop | None:
    """The innermost loop around this that goes over something that plays this part:
    `loop_over(call, "loader")`."""
    return next(
        (
            loop
            for loop in happening.inside(Loop)
            if any(role in roles(value) for value in iterated(loop))
        ),
        None,
    )


def under(happening: Happening, role: str) -> With | None:
    """The innermost with-block around this whose manager plays (or may play) this part:
    `under(call, "no_sync")`."""
    return next(
        (
            block
            for block in happening.inside(With)
            if any(role in roles(manager) for manager in block.managers)
        ),
        None,
    )


def is_conditional(value: Value) -> bool:
    """A value that is something else on another way: `nullcontext() if last else
    model.no_sync()`."""
    return isinstance(value, Choice) and len(list(options(value))) > 1


def number(value: Value | None) -> int | float | None:
    """A number that is known."""
    if (
        isinstance(value, Constant)
        and isinstance(value.value, int | float)
        and not isinstance(value.value, bool)
    ):
        return value.value
    if isinstance(value, Computed):
        found = (
            on_rank(value, 0)
            if not depends_on_rank(value) and not comes_from(value, "world")
            else UNKNOWN
        )
        return found if isinstance(found, int | float) else None
    return None


def is_dotted(value: Value | None, name: str) -> bool:
    return isinstance(value, Dotted) and value.name == name
