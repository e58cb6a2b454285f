"""What is noted in light steps (see `observe.budget`), which most steps of a long run are: that an
operation begins and is over.

A call is known by its event, a few values and its place in the user's code. It is written down
once, with a number; from then on one row of numbers says that it is made (`record.recent`), so that
a hang is named as in a watched step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from paralab.observe import sites
from paralab.observe.rank import Rank
from paralab.record.ring_log import FAILED, OPEN, OPEN_ASIDE

MOST_CALLS = 10_000  # then values are left out: shapes that are new in every step
Values = tuple[Any, ...]
Opened = tuple[int, int, float, int]  # row, call, t, first
Look = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def _nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None


class Light:
    """Of one function. `values`: those of the `names`, given what it is called with, or None:
    nothing to note. `count`: the number of the last collective that this rank has begun, in the
    group of the call; asked before it only, because it is dear: the next one tells how many it
    made. `waits`: also a call that has no such number is noted each time; else only values that are
    new."""

    def __init__(
        self,
        rank: Rank,
        event: str,
        names: tuple[str, ...],
        values: Look = _nothing,
        count: Look = _nothing,
        waits: bool = True,
    ) -> None:
        self.rank, self.event, self.names, self.values, self.count, self.waits = (
            rank,
            event,
            names,
            values,
            count,
            waits,
        )
        self.mark = {"event": event}  # among `rank.doing`
        self.way = (0, 0)  # by which it was called the last time

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Opened | None:
        values = self.values(args, kwargs)
        if values is None:
            return None
        rank, before = self.rank, self.count(args, kwargs)
        if before is None and not self.waits and (self.event, values) in rank.calls:
            return None
        near = sites.near(*self.way)
        call = rank.calls.get((self.event, values, near)) if near else None
        if call is None:
            call = self.call(values, sites.where())
            self.way = sites.way_here()
            if near := sites.near(*self.way):
                rank.calls[self.event, values, near] = call
        first, seconds, t = 0 if before is None else before + 1, OPEN_ASIDE, time.time()
        if threading.get_ident() == rank.main:
            rank.doing.append(self.mark)
            seconds = OPEN
        return rank.recent.begin(call, t, rank.steps, first, seconds), call, t, first  # type: ignore[union-attr]

    def end(
        self, opened: Opened, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._leave()
        self.rank.recent.end(opened[0], time.time() - opened[2])  # type: ignore[union-attr]

    def fail(self, opened: Opened, error: str) -> None:
        """What raised is kept for good, and its row is void."""
        row, call, t, first = opened
        self._leave()
        self.rank.recent.end(row, FAILED)  # type: ignore[union-attr]
        seconds = round(time.time() - t, 6)
        more = {"t": t, "step": self.rank.steps, "first": first, "seconds": seconds, "error": error}
        self.rank.write({"event": "failed", "call": call, **more})

    def _leave(self) -> None:
        doing = self.rank.doing
        if threading.get_ident() != self.rank.main:
            return
        if doing and doing[-1] is self.mark:
            doing.pop()
        elif self.mark in doing:
            del doing[doing.index(self.mark) :]  # what was opened inside it did not come to its end

    def call(self, values: Values, where: sites.Where = ()) -> int:
        """The number of a call, which is written down the first time."""
        rank = self.rank
        if len(rank.calls) >= MOST_CALLS:
            values = (None,) * len(values)
        number = rank.calls.get((self.event, values, where))
        if number is None:
            number = rank.calls[self.event, values, where] = rank.calls[self.event, values] = len(
                rank.calls
            )
            rank.budget.something_new(rank.steps)
            fields = dict(zip(self.names, values, strict=True))
            rank.write(
                {
                    "event": "call",
                    "id": number,
                    "of": self.event,
                    "site": rank.site(where),
                    **fields,
                }
            )
        return number
