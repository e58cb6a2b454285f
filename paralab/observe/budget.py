"""Decide which steps to watch, so that watching stays cheap: the first 64, then one in `every`. A
watched step records everything, and every 64th step also checksums tensors. The other (light)
steps record very little. Each rank measures what its watched steps cost, and picks the smallest
`every` that keeps the average cost below half a percent. `every` is a power of two, so some steps
are watched on all ranks. A light step with something new (a line, shape, mode, or epoch) is
followed by a watched step.
"""

import time
from collections.abc import Callable

from paralab.observe.digests import EVERY, is_sampled

SHARE = 0.005  # the share of a step's time that watching may take, on average
LEAST, LATER = 8, 64  # the smallest interval: in the first 1,024 steps, and from then on
RAREST = 1024


def affordable(plain: float, digests: float, step: float, least: int) -> int:
    """Return the smallest interval that fits the budget. `plain` is the cost of a watched step
    without digests, and `digests` the extra cost of digests, in at most one step in 64.

    a step of 10 ms may cost 0.05 ms more:   plain 0.4 ms    digests 3 ms
      one in   8                                  0.050   +        0.047    too much
      one in  64                                  0.006   +        0.047    too much
      one in 128                                  0.003   +        0.023    fits
    """
    every = least
    while every < RAREST and plain / every + digests / max(every, EVERY) > SHARE * step:
        every *= 2
    return every


class Budget:
    """`until` is the next step whose end must be reported. The light steps before it are not
    reported."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self.spent = 0  # nanoseconds spent in our code since the last reported step
        self.watched = True
        self.until = 1
        self.every = LEAST
        self.all_spent = self.all_passed = 0
        self._plain = self._digests = 0.0
        self._began: int | None = None  # when the current 64 steps began
        self._last = 0  # the last watched step
        self._is_new = False

    def something_new(self, over: int) -> None:
        """Watch the next step, unless we just watched one. `over` is the number of finished
        steps."""
        if over + 2 - self._last >= self.every // 2:
            self._is_new, self.until = True, min(self.until, over + 1)

    def step_is_over(self, step: int) -> bool:
        """Record the end of a step. Return True if a block of 64 steps ends, because its cost is
        now known."""
        spent, self.spent = self.spent, 0
        if self.watched:
            self._last = step
            if is_sampled(step):
                self._digests = _mean(self._digests, max(0.0, spent - self._plain))
            else:
                self._plain = _mean(self._plain, spent)
        if self._began is None:
            self._began = self.clock()  # ignore the time before the first step
        else:
            self.all_spent += spent
        is_known = step % EVERY == 0
        if is_known:
            now = self.clock()
            least = LEAST if step < 16 * EVERY else LATER
            seconds = (now - self._began) / EVERY
            self.every = affordable(self._plain, self._digests, seconds, least)
            self.all_passed += now - self._began
            self._began = now
        following = step + 1
        self.watched = following <= EVERY or following % self.every == 0 or self._is_new
        self._is_new = False
        before_the_next = (following // self.every + 1) * self.every - 1
        block_end = (step // EVERY + 1) * EVERY
        self.until = following if self.watched else min(before_the_next, block_end)
        return is_known

    @property
    def share(self) -> float:
        return self.all_spent / self.all_passed if self.all_passed else 0.0


def _mean(before: float, now: float) -> float:
    """Return a moving average that soon forgets the expensive first steps."""
    return (before + now) / 2 if before else now
