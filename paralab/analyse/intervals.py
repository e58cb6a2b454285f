"""Sets of moments as sorted, disjoint intervals: the arithmetic behind "while nothing else was computed". Pure functions.

compute   ████████████····        union      ████████████████
transfer  ······██████████        overlap    ······██████····     both at once
                                  exposed    ············████     transfer without compute
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """[(0, 2), (1, 3), (5, 6)] -> [(0, 3), (5, 6)]; empty ones are left out."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def without(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """What of the first is not in the second: [(0, 10)] without [(2, 4)] -> [(0, 2), (4, 10)]."""
    left = union(intervals)
    for cut_start, cut_end in union(removed):
        left = [
            piece
            for start, end in left
            for piece in ((start, min(end, cut_start)), (max(start, cut_end), end))
            if piece[1] > piece[0]
        ]
    return left


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union(intervals))
