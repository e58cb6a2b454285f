"""One turn of a loop after another: what a test on a counter comes to in turn 0, 1, 2 … of a loop
that was run once, symbolically.

boundary = (i + 1) % 4 == 0 or i + 1 == len(loader)         turns of 10:   0 1 2 3 4 5 6 7 8 9
                                                            boundary:            ×       ×   ×
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paralab.doctor.script.questions import OPERATORS, UNKNOWN, iterated, origins, roles
from paralab.doctor.script.values import (
    Branch,
    Choice,
    Computed,
    Constant,
    Generated,
    Happening,
    Loop,
    Made,
    Value,
    With,
    same,
)

_APPLIED: dict[str, Callable[..., Any]] = {
    "builtins.int": int,
    "builtins.bool": bool,
    "builtins.min": min,
    "builtins.max": max,
}


@dataclass(frozen=True)
class Turn:
    """Turn `index` of a loop that has `length` turns. `taken`: what unknown numbers are taken to
    be. `resets`: counters that start again after so many turns, by name."""

    loop: Loop
    index: int
    length: int
    taken: tuple[tuple[Value, int], ...] = ()
    resets: dict[str, int] = field(default_factory=dict)


def at(value: Value, turn: Turn) -> Any:
    """What a value is in this turn, or UNKNOWN."""
    for unknown, number in turn.taken:
        if same(value, unknown):
            return number
    if isinstance(value, Constant):
        return value.value
    if isinstance(value, Choice):
        if len(value.tests) == 1 and len(value.options) == 2:
            test = at(value.tests[0], turn)
            return UNKNOWN if test is UNKNOWN else at(value.options[0 if test else 1], turn)
        ways = [at(option, turn) for option in value.options]
        return ways[0] if UNKNOWN not in ways and all(way == ways[0] for way in ways) else UNKNOWN
    if isinstance(value, Made):
        return _made(value, turn)
    return _computed(value, turn) if isinstance(value, Computed) else UNKNOWN


def _made(value: Made, turn: Turn) -> Any:
    call = value.call
    if call.target == "builtins.len" and call.args:
        return (
            turn.length
            if any(call.args[0] is over for over in iterated(turn.loop))
            else _or_unknown(length(call.args[0]))
        )
    if call.target in _APPLIED and call.args and not call.keywords:
        parts = [at(argument, turn) for argument in call.args]
        try:
            return UNKNOWN if UNKNOWN in parts else _APPLIED[call.target](*parts)
        except (TypeError, ValueError):
            return UNKNOWN
    return UNKNOWN


def _computed(value: Computed, turn: Turn) -> Any:
    if is_counter(value):
        return _counted(value, turn)
    if value.op == "Counted":
        return _before_it_is_added_to(value, turn)
    parts = [at(parent, turn) for parent in value.parents]
    if value.op in ("And", "Or"):
        deciding = value.op == "Or"
        if any(part is not UNKNOWN and bool(part) is deciding for part in parts):
            return deciding
        return UNKNOWN if UNKNOWN in parts else not deciding
    if UNKNOWN in parts or not parts:
        return UNKNOWN
    if value.op == "Not":
        return not parts[0]
    try:
        return OPERATORS[value.op](*parts) if value.op in OPERATORS and len(parts) == 2 else UNKNOWN
    except (TypeError, ValueError, ArithmeticError):
        return UNKNOWN


def is_counter(value: Value) -> bool:
    """A number that counts turns: of enumerate, of range, a variable that every turn adds to, an
    attribute likewise."""
    if not isinstance(value, Computed):
        return False
    if value.op == "Item":
        return any(
            isinstance(parent, Made) and parent.call.target == "builtins.range"
            for parent in value.parents
        )
    return value.op in ("Count", "Varying") or _is_added_to_attribute(value)


def _is_added_to_attribute(value: Computed) -> bool:
    return (
        value.op == "Add"
        and isinstance(value.node, ast.AugAssign)
        and isinstance(value.node.target, ast.Attribute)
    )


def _counted(value: Computed, turn: Turn) -> Any:
    if value.op == "Varying":
        name = value.node.id if isinstance(value.node, ast.Name) else ""
        start, added = at(value.parents[0], turn), _added(turn.loop.node, name)
        if added is None or not isinstance(start, int):
            return UNKNOWN
        return start + added * (turn.index % turn.resets.get(name, turn.index + 1))
    if _is_added_to_attribute(value):
        start, added = value.parents[0], at(value.parents[1], turn)
        while isinstance(start, Computed) and start.node is value.node:
            start = start.parents[0]
        first = at(start, turn)
        if not isinstance(first, int) or not isinstance(added, int):
            return UNKNOWN
        assert isinstance(value.node, ast.AugAssign)
        return first + added * (
            turn.index % turn.resets.get(ast.unparse(value.node.target), turn.index + 1) + 1
        )
    over = value.parents[0]
    if not isinstance(over, Made) or not any(over is part for part in iterated(turn.loop)):
        return UNKNOWN
    if value.op == "Count":
        start = over.call.argument(1, "start")
        first = at(start, turn) if start else 0
        return first + turn.index if isinstance(first, int) else UNKNOWN
    args = over.call.args
    first = at(args[0], turn) if len(args) > 1 else 0
    stride = at(args[2], turn) if len(args) > 2 else 1
    return (first if isinstance(first, int) else 0) + turn.index * (
        stride if isinstance(stride, int) else 1
    )


def _before_it_is_added_to(value: Computed, turn: Turn) -> Any:
    """An attribute that one statement of the script adds a number to, where it is read before
    that."""
    start, (first, *more) = at(value.parents[0], turn), value.known["added"]
    step = first.value.value if isinstance(first.value, ast.Constant) else None
    if (
        more
        or not isinstance(first.op, ast.Add)
        or not isinstance(step, int)
        or not isinstance(start, int)
    ):
        return UNKNOWN
    return start + step * (turn.index % turn.resets.get(ast.unparse(first.target), turn.index + 1))


def _added(loop: ast.AST, name: str) -> int | None:
    """What one turn adds to a variable: `seen += 1`."""
    for node in ast.walk(loop):
        if (
            isinstance(node, ast.AugAssign)
            and isinstance(node.op, ast.Add)
            and ast.unparse(node.target) == name
        ):
            return (
                node.value.value
                if isinstance(node.value, ast.Constant) and isinstance(node.value.value, int)
                else None
            )
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.BinOp)
            and isinstance(node.value.op, ast.Add)
        ):
            sides = node.value.left, node.value.right
            if [ast.unparse(target) for target in node.targets] == [name] and ast.unparse(
                sides[0]
            ) == name:
                return (
                    sides[1].value
                    if isinstance(sides[1], ast.Constant) and isinstance(sides[1].value, int)
                    else None
                )
    return None


def counters(test: Value) -> list[Computed]:
    """The counters that a test asks for; not through calls, which make something else of them."""

    def opaque(value: Value) -> bool:
        return is_counter(value) or (isinstance(value, Made) and value.call.target not in _APPLIED)

    return [
        value
        for value in origins(test, opaque)
        if isinstance(value, Computed) and is_counter(value)
    ]


def happens(happening: Happening, turn: Turn, also: tuple[Branch, ...] = ()) -> Any:
    """Does this happen in this turn? By the branches between the loop and the happening; UNKNOWN
    counts only if it decides."""
    known = True
    for context in (*happening.context[happening.context.index(turn.loop) + 1 :], *also):
        if isinstance(context, Branch):
            test = at(context.test, turn)
            if test is UNKNOWN:
                known = False
            elif bool(test) is not context.taken:
                return False
    return True if known else UNKNOWN


def opened(manager: Value, role: str, turn: Turn) -> Any:
    """Does a with-block's manager play this part in this turn? `nullcontext() if last else
    model.no_sync()`"""
    if isinstance(manager, Choice):
        if len(manager.tests) == 1 and len(manager.options) == 2:
            test = at(manager.tests[0], turn)
            if test is not UNKNOWN:
                return opened(manager.options[0 if test else 1], role, turn)
        ways = {opened(option, role, turn) for option in manager.options}
        return next(iter(ways)) if len(ways) == 1 else UNKNOWN
    return role in roles(manager)


def is_under(happening: Happening, role: str, turn: Turn) -> Any:
    """Does this happen inside a with-block of this kind in this turn?"""
    found = [
        opened(manager, role, turn)
        for block in happening.inside(With)
        for manager in block.managers
    ]
    return True if True in found else UNKNOWN if UNKNOWN in found else False


def _or_unknown(number: int | None) -> Any:
    return UNKNOWN if number is None else number


def length(value: Value | None) -> int | None:
    """How many items something has, where the script says it: a range, a list, a dataset of
    tensors, a loader of one process."""
    if isinstance(value, Constant) and isinstance(value.value, str | list | tuple):
        return len(value.value)
    if isinstance(items := getattr(value, "items", None), tuple):
        return len(items)
    if isinstance(value, Computed) and value.op == "Comprehension":
        node = value.node
        if (
            isinstance(node, ast.ListComp)
            and len(node.generators) == 1
            and not node.generators[0].ifs
        ):
            over = node.generators[0].iter
            if (
                isinstance(over, ast.Call)
                and ast.unparse(over.func) == "range"
                and len(over.args) == 1
            ):
                return over.args[0].value if isinstance(over.args[0], ast.Constant) else None  # type: ignore[return-value]
        return None
    if isinstance(value, Generated) and value.each is not None:
        return length(next(context.over for context in value.contexts if isinstance(context, Loop)))
    if not isinstance(value, Made):
        return None
    call = value.call
    if call.target == "builtins.range":
        parts = [_number(argument) for argument in call.args]
        return (
            None
            if None in parts
            else len(range(*(int(part) for part in parts if part is not None)))
        )
    if call.target in ("builtins.list", "builtins.enumerate", "builtins.tuple") and call.args:
        return length(call.args[0])
    if call.target == "torch.utils.data.TensorDataset" and call.args:
        return rows(call.args[0])
    if call.target == "torch.utils.data.Subset":
        return length(call.argument(1, "indices"))
    return _batches(value) if "loader" in roles(value) else rows(value)


def _batches(value: Made) -> int | None:
    call = value.call
    samples, size = (
        length(call.argument(0, "dataset")),
        _number(call.argument(1, "batch_size") or Constant(1)),
    )
    sampler = call.argument(3, "sampler")
    if (
        (sampler is not None and not isinstance(sampler, Constant))
        or "batch_sampler" in call.keywords
        or not samples
        or not size
    ):
        return None
    dropped = call.argument(8, "drop_last")
    if dropped is not None and not isinstance(dropped, Constant):
        return None
    return (
        samples // int(size) if dropped is not None and dropped.value else -(-samples // int(size))
    )


_SHAPED = {f"torch.{name}" for name in ("randn", "rand", "zeros", "ones", "empty")}
_KEEP_ROWS = {
    "to",
    "cuda",
    "cpu",
    "float",
    "half",
    "double",
    "long",
    "clone",
    "detach",
    "contiguous",
    "requires_grad_",
}


def rows(value: Value | None) -> int | None:
    """The first dimension of a tensor, where it is made."""
    if not isinstance(value, Made):
        return None
    call = value.call
    if call.target in _SHAPED:
        size = call.args[0] if call.args else call.keywords.get("size")
    elif call.target == "torch.randint":
        size = call.keywords.get("size") or next(
            (argument for argument in call.args if hasattr(argument, "items")), None
        )
    elif call.target in ("torch.full",):
        size = call.args[0] if call.args else None
    elif call.target == "torch.arange" and len(call.args) == 1:
        size = call.args[0]
    elif call.target == "torch.linspace":
        size = call.argument(2, "steps")
    elif call.method in _KEEP_ROWS and call.receiver is not None:
        return rows(call.receiver)
    else:
        return None
    items = getattr(size, "items", None)
    found = _number(items[0] if isinstance(items, tuple) and items else size)
    return None if found is None else int(found)


def _number(value: Value | None) -> int | float | None:
    """A number that does not depend on where the loop is."""
    if isinstance(value, Constant):
        return (
            value.value
            if isinstance(value.value, int | float) and not isinstance(value.value, bool)
            else None
        )
    if isinstance(value, Computed) and value.op in OPERATORS and len(value.parents) == 2:
        parts = [_number(parent) for parent in value.parents]
        try:
            return None if None in parts else OPERATORS[value.op](*parts)
        except (TypeError, ValueError, ArithmeticError):
            return None
    if isinstance(value, Made) and value.call.target == "builtins.int" and value.call.args:
        return _number(value.call.args[0])
    return None
