"""Decide which configurations of a search need another round. These are pure functions on plain
numbers.

A measurement can be slow by chance, but is hardly ever fast by chance. So a configuration leaves
the race only if even its best round is slower than the leader's median by some margin. The margin
shrinks with the number of rounds. Times relative to the default:

    round   1     2     3    median
    a      0.70  0.72  0.71   0.71   the leader
    b      0.69  1.20  1.10   1.10   stays: its last two rounds may be noise
    c      0.90  0.95         0.90   leaves: both rounds are more than 1.05 times 0.71
    d      1.50               1.50   leaves after one round: more than twice 0.71
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

# After one, two, and three rounds, the best of them must be this many times as slow as the leader.
MARGINS = (2.0, 1.05, 1.02)
MOST_ROUNDS = len(MARGINS)

Name = TypeVar("Name", bound=Hashable)


def typical(times: Sequence[float]) -> float:
    """Return the median or, of two rounds, the faster one, because noise only makes a round
    slower."""
    return statistics.median_low(times)


def is_slower(own: Sequence[float], leader: Sequence[float]) -> bool:
    """Return whether a configuration is clearly slower than the leader."""
    margin = MARGINS[min(len(own), MOST_ROUNDS) - 1]
    return min(own) > margin * typical(leader)


def rank(times: Mapping[Name, Sequence[float]]) -> list[Name]:
    """Return the configurations, fastest first. Those that are clearly slower come last."""
    leader = min(times.values(), key=typical, default=())
    return sorted(times, key=lambda each: (is_slower(times[each], leader), typical(times[each])))


def find_unsettled(times: Mapping[Name, Sequence[float]], keep: int) -> list[Name]:
    """Return the configurations to measure again, to find the best `keep`."""
    ordered = rank(times)
    left = [name for name in ordered if not is_slower(times[name], times[ordered[0]])]
    if len(left) <= keep:
        return []
    return [name for name in left if len(times[name]) < MOST_ROUNDS]
