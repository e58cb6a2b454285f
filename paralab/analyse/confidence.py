"""Is it faster, and how sure is that? Ratios measured side by side in rounds, with their 95 %
interval.

A noisy machine slows whole stretches of time, so two set-ups are compared within each round and the
rounds are averaged:

    round      1      2      3            ratio  a/b   1.98   2.05   2.01
    a       50 ms  90 ms  52 ms           (round 2 was slow for both: the ratio does not see it)
    b       25 ms  44 ms  26 ms           mean 2.01, interval 1.93 … 2.10: b is faster

Logarithms are averaged, so that "twice as fast" and "half as fast" are equally far from 1;
Student's t widens the interval for the few rounds there are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t, two-sided 95 %, by degrees of freedom; beyond the table it stays above 1.96 by
# little.
T95 = (
    math.inf,
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
)
FEWEST = 3  # rounds: with two, Student's t gives an interval too wide to say anything
SMALLEST = 0.01  # a difference below 1 % does not count, however certain it is
SAME = 0.1  # an interval within ±10 % of 1 rules out any difference that matters


@dataclass(frozen=True)
class Ratio:
    """How many times as fast: `value`, between `low` and `high` with 95 % confidence (None: too few
    rounds)."""

    value: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """`no difference` is a result; `too noisy` says that these rounds give none."""
        if self.low is None or self.high is None:
            return "too few rounds"
        if self.low > 1 and self.value > 1 + SMALLEST:
            return "faster"
        if self.high < 1 and self.value < 1 - SMALLEST:
            return "slower"
        return "no difference" if self.low > 1 - SAME and self.high < 1 + SAME else "too noisy"

    @property
    def is_faster(self) -> bool | None:
        """None if the rounds cannot tell."""
        if self.verdict in ("too few rounds", "too noisy"):
            return None
        return self.verdict == "faster"

    def reaches(self, goal: float) -> bool | None:
        """Is the true ratio at least GOAL? None if the goal lies inside the interval."""
        if self.low is None or self.high is None:
            return None
        return True if self.low >= goal else False if self.high < goal else None

    def choose(self, faster: str, slower: str) -> str | None:
        """The name of the faster side; None if there is no difference, or none that shows."""
        return {"faster": faster, "slower": slower}.get(self.verdict)


def speed_up(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """Of seconds measured in the same rounds: before / after."""
    logs = [math.log(b / a) for b, a in zip(before, after, strict=True)]
    mean = statistics.mean(logs)
    if len(logs) < FEWEST:
        return Ratio(math.exp(mean), None, None)
    t = T95[len(logs) - 1] if len(logs) <= len(T95) else T95[-1]
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
