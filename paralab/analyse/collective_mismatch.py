"""Ranks that wait for one another in different collectives: nobody is missing, and the network is
fine.

Collectives are matched by their number in a group, not by name:

    group 0   number 7        number 8                      the ranks come apart at number 8
    rank 0    all_reduce      reduce_scatter, waits
    rank 1    all_reduce      all_gather, waits

Where the flight recorder has nothing (send and recv over gloo), the stacks tell the kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from paralab.analyse.stack_dumps import Testimony, Wait, is_open, wait_of

SAME_SIZE = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
)  # every rank brings as many values
POINT_TO_POINT = ("send", "recv")
EVERYBODY = "0"  # the default group


@dataclass(frozen=True)
class Mismatch:
    ranks: tuple[int, int]
    waits: tuple[Wait, Wait]
    lines: tuple[str | None, str | None]

    @property
    def why(self) -> str:
        mine, its = self.waits
        elsewhere = ""
        if str(mine) == str(its):
            elsewhere = (
                " of another group"
                if mine.group != its.group
                else " at another line"
                if len(set(self.lines)) > 1
                else ""
            )
        return (
            f"calls {mine} where rank {self.ranks[1]} calls {its}{elsewhere}, and both wait forever"
        )


def find_mismatch(said: list[Testimony]) -> Mismatch | None:
    """The first one; of more than two ranks, the one that differs from most others is named
    first."""
    found = list(_mismatches(said))
    if not found:
        return None
    times = Counter(rank for mismatch in found for rank in mismatch.ranks)
    first = max(found, key=lambda mismatch: max(times[rank] for rank in mismatch.ranks))
    (a, b), (mine, its), (here, there) = first.ranks, first.waits, first.lines
    return first if times[a] >= times[b] else Mismatch((b, a), (its, mine), (there, here))


def _mismatches(said: list[Testimony]) -> Iterator[Mismatch]:
    for one, other in combinations(said, 2):
        mine, its = one.waits_in, other.waits_in
        if mine is None or its is None:
            continue  # one that does not wait may still come
        different = _in_one_group(one, other, mine, its)
        if different is None and (
            _wait_for_each_other(one, other, mine, its) or _on_the_stacks(said, mine, its)
        ):
            different = mine, its
        if different:
            yield Mismatch((one.rank, other.rank), different, (one.where, other.where))


def _in_one_group(
    one: Testimony, other: Testimony, mine: Wait, its: Wait
) -> tuple[Wait, Wait] | None:
    """The same number, but another kind, another size, or another line."""
    theirs = {
        (wait.group, wait.number): (wait, is_open(entry))
        for entry in other.numbered
        for wait in [wait_of(entry)]
    }
    for entry in one.numbered:
        a = wait_of(entry)
        b, waits = theirs.get((a.group, a.number), (a, False))
        if not (waits or is_open(entry)):
            continue  # both came through it
        here, there = (
            (a.group, a.number) == (mine.group, mine.number),
            (b.group, b.number) == (its.group, its.number),
        )
        called = (
            replace(a, kind=mine.kind if here else a.kind),
            replace(b, kind=its.kind if there else b.kind),
        )
        sizes = a.kind in SAME_SIZE and a.values != b.values
        lines = here and there and bool(one.calls and other.calls) and one.where != other.where
        if (
            a.kind != b.kind
            or sizes
            or (here and there and one.calls and other.calls and one.calls != other.calls)
            or lines
        ):
            return called
    return None


def _wait_for_each_other(one: Testimony, other: Testimony, mine: Wait, its: Wait) -> bool:
    """In two groups to which both belong, each at a number that the other one has not come to."""
    if mine.group is None or its.group is None or mine.group == its.group:
        return False

    def is_missing(rank: Testimony, wait: Wait) -> bool:
        assert wait.group is not None
        assert wait.number is not None
        arrived = rank.arrived(wait.group)
        return (arrived > 0 or wait.group == EVERYBODY) and arrived < wait.number

    return is_missing(other, mine) and is_missing(one, its)


def _on_the_stacks(said: list[Testimony], mine: Wait, its: Wait) -> bool:
    """Without numbers: two ranks have nobody else to wait for. Of more, different kinds of the same
    group cannot be told from different groups."""
    if len(said) > 2 or (mine.group and its.group):
        return False
    if {mine.kind, its.kind} <= set(POINT_TO_POINT):
        return mine.kind == its.kind
    return mine.kind != its.kind
