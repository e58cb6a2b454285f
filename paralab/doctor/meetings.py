"""Where ranks meet: collectives are matched by their number in a group, not by name. This finds
where the ranks come apart.

A collective's number comes from the process group itself, so those that DDP makes (buffers in a
forward, buckets in a backward, all of a wrap) are counted as well, and belong to the line of the
user's code that caused them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from paralab.doctor.events import Backward, Collective, Forward, Init, Wrap
from paralab.doctor.observation import Numbered, Observation, RankSeen
from paralab.doctor.place import Place

# What a rank says whose partner is not where it should be: it is the victim.
TRANSPORT = re.compile(
    r"Connection closed by peer|Connection reset by peer|Timed out waiting|Broken pipe|gloo|Socket Timeout|NCCL|nccl|"
    r"DistBackendError|DistNetworkError|DistStoreError|wait timeout|Application timeout|Aborted",
)


def raised_of_its_own(rank: RankSeen) -> bool:
    """An exception that is not merely the loss of another rank."""
    raised = rank.raised
    return raised is not None and not TRANSPORT.search(f"{raised.type}: {raised.message}")


@dataclass(frozen=True)
class Stuck:
    """A rank inside an operation that needs the others: it waits there, was killed there, or failed
    there as a victim."""

    rank: RankSeen
    operation: Numbered
    group: str
    number: int
    failed: str | None  # the message

    @property
    def place(self) -> Place | None:
        return self.operation.site.place if self.operation.site else None


@dataclass(frozen=True)
class Difference:
    """The first number of a group under which two ranks made different calls."""

    group: str
    number: int
    one: RankSeen
    mine: Numbered
    other: RankSeen
    its: Numbered


def stuck(rank: RankSeen) -> Stuck | None:
    for operation in reversed(rank.doing if rank.settled else ()):
        if isinstance(operation, Numbered) and operation.seq and _is_waiting(rank, operation):
            return _stuck(rank, operation, None)
    last = next(
        (event for event in reversed(rank.story) if isinstance(event, Numbered) and event.seq), None
    )
    if last is not None and last.error and TRANSPORT.search(last.error):
        return _stuck(rank, last, last.error)
    return None


def _is_waiting(rank: RankSeen, operation: Numbered) -> bool:
    """A forward, backward or wrap that takes long may just compute, or import: the flight recorder
    knows, where the rank could be asked. One that is empty after collectives were made is not there
    at all."""
    if (
        isinstance(operation, Collective)
        or rank.said is None
        or (not rank.said.collectives and rank.collectives)
    ):
        return True
    return any(call.is_open for call in rank.said.collectives)


def _stuck(rank: RankSeen, operation: Numbered, failed: str | None) -> Stuck:
    assert operation.seq
    group = group_of(operation)
    number = operation.seq[0]
    if rank.said and not isinstance(
        operation, Collective
    ):  # which of the bucket's collectives it waits in
        open_ = [
            call.number
            for call in rank.said.collectives
            if call.is_open and call.group == group and call.number is not None
        ]
        number = max([number, *open_[:1]])
    return Stuck(rank, operation, group, number, failed)


def group_of(operation: Numbered) -> str:
    return (operation.group if isinstance(operation, Collective) else None) or "0"


def members(seen: Observation, group: str) -> list[RankSeen]:
    from_events = {
        number
        for rank in seen.ranks
        for event in rank.events
        if getattr(event, "group", None) == group
        and isinstance(getattr(event, "ranks", None), list)
        for number in event.ranks  # type: ignore[attr-defined]
    }
    return [rank for rank in seen.ranks if not from_events or rank.rank in from_events]


def reached(rank: RankSeen, group: str) -> int:
    """The number of the last collective that a rank has come to."""
    numbers = list(rank.collectives.get(group, {}))
    where = stuck(rank)
    if where and where.group == group:
        numbers.append(where.number)
    return max(numbers, default=0)


def at(rank: RankSeen, group: str, number: int) -> Numbered | None:
    """What a rank did under this number, also if it has not come out of it."""
    found = rank.collectives.get(group, {}).get(number)
    if found is not None:
        return found
    where = stuck(rank)
    return where.operation if where and where.group == group and where.number == number else None


def differences(seen: Observation) -> Iterator[Difference]:
    """For every group and pair of ranks the first number where they made different calls."""
    groups = dict.fromkeys(
        group for rank in seen.ranks for group in (*rank.collectives, *_stuck_group(rank))
    )
    for group in groups:
        ranks = members(seen, group)
        for one, other in ((one, other) for i, one in enumerate(ranks) for other in ranks[i + 1 :]):
            for number in range(1, min(reached(one, group), reached(other, group)) + 1):
                mine, its = at(one, group, number), at(other, group, number)
                if mine is not None and its is not None and not is_same_call(mine, its):
                    yield Difference(group, number, one, mine, other, its)
                    break


def _stuck_group(rank: RankSeen) -> list[str]:
    where = stuck(rank)
    return [where.group] if where else []


def is_same_call(one: Numbered, other: Numbered) -> bool:
    """Backward passes and wraps are the same wherever they are called; a forward or a collective is
    known by its line."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (Backward, Wrap)) or one.site is None or other.site is None:
        return True
    return one.site == other.site


def kind(operation: Numbered) -> str:
    """What goes over the wire."""
    if isinstance(operation, Collective):
        return operation.op
    return {Forward: "broadcast", Backward: "all_reduce", Wrap: "broadcast"}[type(operation)]


def named(operation: Numbered) -> str:
    """In words, with the line."""
    where = f" at {operation.site}" if operation.site else ""
    if isinstance(operation, Collective):
        size = f" of {_values(operation.shape)}" if operation.shape is not None else ""
        return f"{operation.op}{size}{where}"
    words = {
        Forward: "the forward of the DDP model, which broadcasts its buffers,",
        Backward: "the backward pass, where DDP reduces the gradients,",
        Wrap: "DistributedDataParallel(…)",
    }
    return f"{words[type(operation)]}{where}"


def _values(shape: list[int]) -> str:
    count = 1
    for size in shape:
        count *= size
    return "1 value" if count == 1 else f"{count:,} values"


def calls_from(rank: RankSeen, operation: Numbered) -> int:
    """How often a rank has made this call (same kind, same place), open ones included."""
    return sum(
        is_same_call(operation, event)
        for event in (*rank.story, *rank.doing)
        if isinstance(event, Numbered)
    )


def timeout_seconds(rank: RankSeen) -> float | None:
    init = rank.last(Init)
    return init.timeout_seconds if init else None
