"""What a model is fed with: the loaders behind the arguments of a forward. Where a tensor is moved
to does not make it another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paralab.doctor.script.naming import LOADER
from paralab.doctor.script.values import Call, Made, Value, options

_MOVES = {"to", "cuda"}


def content(value: Value) -> Iterator[Value]:
    """The value and all that it was computed from, but not the devices that it was moved to."""
    seen = {id(value)}
    waiting = [value]
    while waiting:
        current = waiting.pop(0)
        yield current
        moved = (
            isinstance(current, Made)
            and current.call.method in _MOVES
            and current.call.receiver is not None
        )
        parents = (
            (current.call.receiver,) if moved and isinstance(current, Made) else current.parents
        )
        for parent in parents:
            if parent is not None and id(parent) not in seen:
                seen.add(id(parent))
                waiting.append(parent)


def loaders_of(forwards: Iterable[Call]) -> list[Call]:
    """The DataLoader calls whose batches these forwards are given."""
    given = (value for call in forwards for value in (*call.args, *call.keywords.values()))
    made = (
        part.call
        for value in given
        for part in content(value)
        if isinstance(part, Made) and part.call.target == LOADER
    )
    return list(dict.fromkeys(made))


def may_be(value: Value, other: Value) -> bool:
    """May two values be one thing?"""
    return bool({id(way) for way in options(value)} & {id(way) for way in options(other)})
