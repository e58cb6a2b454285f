"""Decide whether one configuration is faster than another, using ratios within rounds and a 95%
confidence interval.

A noisy machine is slow for long stretches at a time. So we compare two configurations within each
round, and average the ratios over the rounds:

    round      1      2      3            ratio  a/b   1.98   2.05   2.01
    a       50 ms  90 ms  52 ms           (round 2 was slow for both, so the ratio is unaffected)
    b       25 ms  44 ms  26 ms           mean 2.01, interval 1.93 … 2.10: b is faster

We average logarithms, so "twice as fast" and "half as fast" are equally far from 1. Student's t
widens the interval when there are few rounds.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Self

from paralab.record.types import Record

# Student's t, two-sided 95%, by degrees of freedom. Use the last value beyond the table.
T95 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306,
       2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)  # fmt: skip
FEWEST = 3  # the interval from two rounds is too wide to be useful
SMALLEST = 0.01  # ignore differences below 1%, even if they are certain
SAME = 0.1  # an interval within ±10% of 1 rules out any difference that matters


class SpeedUp(Record, frozen=True, kw_only=True):
    """The speed-up in samples per second, and its 95% interval (None with too few rounds)."""

    value: float
    low: float | None
    high: float | None
    verdict: str  # baseline, faster, slower, no difference, too noisy, too few rounds

    @classmethod
    def of(cls, value: float, low: float | None = None, high: float | None = None) -> Self:
        """Add the verdict. `no difference` is a definite result, but `too noisy` is not."""
        if low is None or high is None:
            verdict = "too few rounds"
        elif low > 1 and value > 1 + SMALLEST:
            verdict = "faster"
        elif high < 1 and value < 1 - SMALLEST:
            verdict = "slower"
        else:
            verdict = "no difference" if low > 1 - SAME and high < 1 + SAME else "too noisy"
        return cls(value=value, low=low, high=high, verdict=verdict)

    @property
    def is_faster(self) -> bool | None:
        """Whether there is a real speed-up, or None if the rounds cannot tell."""
        return {"faster": True, "slower": False, "no difference": False}.get(self.verdict)

    def reaches(self, goal: float) -> bool | None:
        """Return whether the true value is at least `goal`; None if the interval contains it."""
        if self.low is None or self.high is None:
            return None
        return True if self.low >= goal else False if self.high < goal else None


def speed_up(before: Sequence[float], after: Sequence[float]) -> SpeedUp:
    """Return the speed-up `before` / `after` of two lists of step times from the same rounds."""
    logs = [math.log(b / a) for b, a in zip(before, after, strict=True)]
    mean = statistics.mean(logs)
    if len(logs) < FEWEST:
        return SpeedUp.of(math.exp(mean))
    t = T95[min(len(logs), len(T95)) - 1]
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return SpeedUp.of(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
