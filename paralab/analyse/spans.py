"""Stretches of time on one clock: how much they cover together, and how to lay them out in lanes so that each lane can be drawn.

Pure functions on plain numbers, which may be seconds or microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[float, float]  # start, end


def covered(spans: Iterable[Span]) -> float:
    """The length of the union: time in which at least one was under way.

    [0, 4] and [3, 6] and [8, 9]  ->  7, not 8
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def lanes(spans: Sequence[Span], nested: bool) -> list[int]:
    """The lane of every span: the first one in which it neither crosses another nor, unless `nested`, lies within one.

    a ├──────────┤                    nested: a and b share lane 0 (b is a part of a), c crosses a: lane 1
    b   ├───┤                         apart:  b and c have their own lanes, d comes after a: lane 0
    c          ├─────┤
    d                  ├──┤
    """
    found = [0] * len(spans)
    open_ends: list[list[float]] = []  # per lane: the ends of what is under way, the innermost last
    # The longer one first where two begin together: it can hold the other.
    for number in sorted(range(len(spans)), key=lambda number: (spans[number][0], -spans[number][1])):
        start, end = spans[number]
        for ends in open_ends:
            while ends and ends[-1] <= start:
                ends.pop()
        fits = (lane for lane, ends in enumerate(open_ends) if not ends or (nested and end <= ends[-1]))
        lane = next(fits, len(open_ends))
        if lane == len(open_ends):
            open_ends.append([])
        open_ends[lane].append(end)
        found[number] = lane
    return found
