"""Layers onto stages by measured time: contiguous parts whose slowest one is as fast as possible.

seconds   3 1 1 1 2      over 2 stages
          [3 1] [1 1 2]  slowest 4          not [3 1 1] [1 2] (5), and not by count
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


def split_by_time(seconds: Sequence[float], stages: int) -> list[tuple[int, int]]:
    """(first, stop) layer of each stage. Every stage gets at least one layer."""
    assert 1 <= stages <= len(seconds)
    total = [0.0]
    for value in seconds:
        total.append(total[-1] + value)

    @cache
    def best(first: int, stages_left: int) -> tuple[float, int]:
        """(slowest stage, where this stage stops) for layers first … end over stages_left stages."""
        if stages_left == 1:
            return total[-1] - total[first], len(seconds)
        stops = range(first + 1, len(seconds) - stages_left + 2)
        return min((max(total[stop] - total[first], best(stop, stages_left - 1)[0]), stop) for stop in stops)

    parts, first = [], 0
    for stages_left in range(stages, 0, -1):
        stop = best(first, stages_left)[1]
        parts.append((first, stop))
        first = stop
    return parts
