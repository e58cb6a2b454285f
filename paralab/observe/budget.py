"""What being observed may cost, and so which steps are watched: the first 64, then one in `every`.

In a watched step everything is written down and kept, with checksums of tensors where its number is
a multiple of 64; in the others (light ones) next to nothing. `every` follows from what watched
steps were measured to cost, and the steps' own time: it is as small as keeps the average below half
a percent. Ranks measure for themselves: who reads takes the steps that all of them watched, and as
`every` is a power of two there always are some. A light step that brought something new (a line, a
shape, a mode, an epoch) is followed by a watched one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paralab.observe.digests import EVERY, is_sampled

SHARE = 0.005  # of a step's time, for watched steps on the average
LEAST, LATER = (
    8,
    64,
)  # one step in so many is watched, however cheap: in the first 1,024, and from then on
RAREST = 1024


def affordable(plain: float, digests: float, step: float, least: int) -> int:
    """One step in so many may be watched. `plain`, `digests`: what a watched step costs without
    digests, and what they cost more.

    a step of 10 ms may cost 0.05 ms more:   plain 0.4 ms    digests 3 ms (one step in 64 at most)
      one in   8                                  0.050   +        0.047    too much
      one in  64                                  0.006   +        0.047    too much
      one in 128                                  0.003   +        0.023    can be afforded
    """
    every = least
    while every < RAREST and plain / every + digests / max(every, EVERY) > SHARE * step:
        every *= 2
    return every


class Budget:
    """`until`: the next step whose end must be told; of the light ones before it nothing needs to
    be known."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self.spent = (
            0  # nanoseconds since the last step that was told, added up by all that observes
        )
        self.watched = True
        self.until = 1
        self.every = LEAST
        self.all_spent = self.all_passed = 0
        self._plain = self._digests = 0.0
        self._began: int | None = None  # the present 64 steps
        self._last = 0  # the last step that was watched
        self._is_new = False

    def something_new(self, over: int) -> None:
        """In the step after the `over` ones: the next one is watched, unless there was one just
        now."""
        if over + 2 - self._last >= self.every // 2:
            self._is_new, self.until = True, min(self.until, over + 1)

    def step_is_over(self, step: int) -> bool:
        """True: what the last 64 steps cost is known now."""
        spent, self.spent = self.spent, 0
        if self.watched:
            self._last = step
            if is_sampled(step):
                self._digests = _mean(self._digests, max(0.0, spent - self._plain))
            else:
                self._plain = _mean(self._plain, spent)
        if self._began is None:
            self._began = self.clock()  # what came before the first step is not training
        else:
            self.all_spent += spent
        is_known = step % EVERY == 0
        if is_known:
            now = self.clock()
            self.every = affordable(
                self._plain,
                self._digests,
                (now - self._began) / EVERY,
                LEAST if step < 16 * EVERY else LATER,
            )
            self.all_passed += now - self._began
            self._began = now
        following = step + 1
        self.watched = following <= EVERY or following % self.every == 0 or self._is_new
        self._is_new = False
        before_the_next = (following // self.every + 1) * self.every - 1
        self.until = (
            following if self.watched else min(before_the_next, (step // EVERY + 1) * EVERY)
        )
        return is_known

    @property
    def share(self) -> float:
        """Of the time since the first step, that observing has taken."""
        return self.all_spent / self.all_passed if self.all_passed else 0.0


def _mean(before: float, now: float) -> float:
    """Follows within a few steps; the first ones, which cost more, are forgotten."""
    return (before + now) / 2 if before else now
