"""Detect ranks that wait for each other in different collectives, although every rank has arrived
and the network is fine.

Collectives are matched by their sequence number in a process group, not by name:

    group 0   number 7        number 8                      the ranks differ at number 8
    rank 0    all_reduce      reduce_scatter, waits
    rank 1    all_reduce      all_gather, waits

If the flight recorder has no entries, as for send and recv over gloo, the stack traces show the
kind of collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from paralab.analyse.stack_dumps import StackDump, Wait

# Collectives in which each rank contributes the same number of values.
SAME_SIZE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
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
                " in another group"
                if mine.group != its.group
                else " on another line"
                if len(set(self.lines)) > 1
                else ""
            )
        return (
            f"calls {mine} where rank {self.ranks[1]} calls {its}{elsewhere}, and both wait forever"
        )


def find_mismatch(dumps: list[StackDump]) -> Mismatch | None:
    """Return the first mismatch. With more than two ranks, its first rank is the one that differs
    from the most others."""
    found = list(_mismatches(dumps))
    if not found:
        return None
    times = Counter(rank for mismatch in found for rank in mismatch.ranks)
    first = max(found, key=lambda mismatch: max(times[rank] for rank in mismatch.ranks))
    (a, b), (mine, its), (here, there) = first.ranks, first.waits, first.lines
    return first if times[a] >= times[b] else Mismatch((b, a), (its, mine), (there, here))


def _mismatches(dumps: list[StackDump]) -> Iterator[Mismatch]:
    for one, other in combinations(dumps, 2):
        mine, its = one.waits_in, other.waits_in
        if mine is None or its is None:
            continue  # a rank that is not waiting yet may still arrive
        different = _in_one_group(one, other, mine, its)
        if different is None and (
            _wait_for_each_other(one, other, mine, its) or _on_the_stacks(dumps, mine, its)
        ):
            different = mine, its
        if different:
            yield Mismatch((one.rank, other.rank), different, (one.where, other.where))


def _in_one_group(
    one: StackDump, other: StackDump, mine: Wait, its: Wait
) -> tuple[Wait, Wait] | None:
    """Find a collective with the same sequence number on both ranks but a different kind, size, or
    source line."""
    theirs = {
        (entry.group, entry.collective_seq_id): (entry.wait, entry.is_open)
        for entry in other.numbered
    }
    for entry in one.numbered:
        a = entry.wait
        b, waits = theirs.get((entry.group, entry.collective_seq_id), (a, False))
        if not (waits or entry.is_open):
            continue  # both ranks finished this collective
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


def _wait_for_each_other(one: StackDump, other: StackDump, mine: Wait, its: Wait) -> bool:
    """Check whether two ranks block each other: each waits in a group they share, at a sequence
    number the other has not reached."""
    if mine.group is None or its.group is None or mine.group == its.group:
        return False

    def is_missing(rank: StackDump, wait: Wait) -> bool:
        assert wait.group is not None
        assert wait.number is not None
        arrived = rank.arrived(wait.group)
        return (arrived > 0 or wait.group == EVERYBODY) and arrived < wait.number

    return is_missing(other, mine) and is_missing(one, its)


def _on_the_stacks(dumps: list[StackDump], mine: Wait, its: Wait) -> bool:
    """Decide from the stacks alone, without sequence numbers. Two ranks can only be waiting for
    each other. With more ranks, collectives of different kinds may belong to different groups."""
    if len(dumps) > 2 or (mine.group and its.group):
        return False
    if {mine.kind, its.kind} <= set(POINT_TO_POINT):
        return mine.kind == its.kind
    return mine.kind != its.kind
