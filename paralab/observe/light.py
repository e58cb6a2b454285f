"""What light steps record (see `observe.budget`): only when operations begin and end.

The first call writes a description (its event, a few values, and its line in the user's code) with
a number. From then on, each such call adds one row of numbers (`record.operations`). This is enough
to locate a hang as in a watched step.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from paralab.observe import sites
from paralab.observe.rank import Fields, Rank
from paralab.record.operations import FAILED, OPEN, OPEN_ASIDE

MOST_CALLS = 10_000  # after this many, omit values, because every step has new shapes
Values = tuple[Any, ...]
Opened = tuple[int, int, float, int]  # row, call, t, first
Look = Callable[[tuple[Any, ...], Fields], Any]


def _nothing(args: tuple[Any, ...], kwargs: Fields) -> None:
    return None


class Light:
    """Records the calls to one function.

    values  returns the values for `names`, from the arguments, or None to record nothing
    count   returns the number of the last collective that this rank began in the call's group. It
            is slow, so it runs only before the call. The next call's number shows how many
            collectives this call ran
    waits   if False, record a call without such a number only if its values are new
    """

    def __init__(
        self,
        rank: Rank,
        event: str,
        names: tuple[str, ...],
        values: Look = _nothing,
        count: Look = _nothing,
        waits: bool = True,
    ) -> None:
        self.rank, self.event, self.names = rank, event, names
        self.values, self.count, self.waits = values, count, waits
        self.mark = {"event": event}  # the entry in `rank.doing`

    def begin(self, args: tuple[Any, ...], kwargs: Fields) -> Opened | None:
        values = self.values(args, kwargs)
        if values is None:
            return None
        rank, before = self.rank, self.count(args, kwargs)
        if before is None and not self.waits and (self.event, values) in rank.calls:
            return None
        call = self.call(values, sites.where())
        first, seconds, t = 0 if before is None else before + 1, OPEN_ASIDE, time.time()
        if threading.get_ident() == rank.main:
            rank.doing.append(self.mark)
            seconds = OPEN
        return rank.recent.begin(call, t, rank.steps, first, seconds), call, t, first  # type: ignore[union-attr]

    def end(self, opened: Opened, result: Any, args: tuple[Any, ...], kwargs: Fields) -> None:
        self._leave()
        self.rank.recent.end(opened[0], time.time() - opened[2])  # type: ignore[union-attr]

    def fail(self, opened: Opened, error: str) -> None:
        """Record a call that raised an exception, and invalidate its row."""
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
            del doing[doing.index(self.mark) :]  # nested operations never finished

    def call(self, values: Values, where: sites.Where = ()) -> int:
        """Return the number of a call. The first time, write what the number means."""
        rank = self.rank
        if len(rank.calls) >= MOST_CALLS:
            values = (None,) * len(values)
        number = rank.calls.get((self.event, values, where))
        if number is None:
            number = len(rank.calls)
            rank.calls[self.event, values, where] = rank.calls[self.event, values] = number
            rank.budget.something_new(rank.steps)
            fields = dict(zip(self.names, values, strict=True))
            head = {"event": "call", "id": number, "of": self.event, "site": rank.site(where)}
            rank.write({**head, **fields})
        return number
