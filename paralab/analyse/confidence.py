"""Decide whether one configuration is faster than another, using ratios within rounds and a 95 %
confidence interval.

A noisy machine is slow for long stretches at a time. Two configurations are therefore compared
within each round, and the ratios are averaged over the rounds:

    round      1      2      3            ratio  a/b   1.98   2.05   2.01
    a       50 ms  90 ms  52 ms           (round 2 was slow for both, so the ratio is unaffected)
    b       25 ms  44 ms  26 ms           mean 2.01, interval 1.93 … 2.10: b is faster

We average logarithms, so "twice as fast" and "half as fast" are equally far from 1. Student's t
widens the interval when there are few rounds.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t, two-sided 95 %, by degrees of freedom. Beyond the table, it is slightly above 1.96.
T95 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306,
       2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)  # fmt: skip
FEWEST = 3  # rounds; with two, the interval is too wide to be useful
SMALLEST = 0.01  # ignore differences below 1 %, even if they are certain
SAME = 0.1  # an interval within ±10 % of 1 rules out any difference that matters


@dataclass(frozen=True)
class Ratio:
    """A speed-up. With 95 % confidence, the true value lies between `low` and `high`. Both are None
    if there are too few rounds."""

    value: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """`no difference` is a definite result; `too noisy` is undecided."""
        if self.low is None or self.high is None:
            return "too few rounds"
        if self.low > 1 and self.value > 1 + SMALLEST:
            return "faster"
        if self.high < 1 and self.value < 1 - SMALLEST:
            return "slower"
        return "no difference" if self.low > 1 - SAME and self.high < 1 + SAME else "too noisy"

    @property
    def is_faster(self) -> bool | None:
        """Whether there is a real speed-up, or None if the rounds cannot tell."""
        if self.verdict in ("too few rounds", "too noisy"):
            return None
        return self.verdict == "faster"

    def reaches(self, goal: float) -> bool | None:
        """Return whether the true ratio is at least `goal`; None if the interval contains it."""
        if self.low is None or self.high is None:
            return None
        return True if self.low >= goal else False if self.high < goal else None

    def choose(self, faster: str, slower: str) -> str | None:
        """Return the name of the faster side, or None if the rounds show no difference."""
        return {"faster": faster, "slower": slower}.get(self.verdict)


def speed_up(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """Return `before` / `after`, two lists of step times from the same rounds."""
    logs = [math.log(b / a) for b, a in zip(before, after, strict=True)]
    mean = statistics.mean(logs)
    if len(logs) < FEWEST:
        return Ratio(math.exp(mean), None, None)
    t = T95[min(len(logs), len(T95)) - 1]
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
