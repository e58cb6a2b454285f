"""The collectives of watched ranks as `CollectiveCall`s.

The process group itself numbers them, so the numbers include DDP's collectives: buffers in a
forward, buckets in a backward, and all collectives in a wrap. Each collective belongs to the line
of user code that caused it.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from paralab.analyse.collective_matching import (
    DEFAULT_GROUP,
    CollectiveCall,
    Difference,
    Mismatch,
    differ,
    find_mismatches,
)
from paralab.doctor.events import Backward, Collective, Forward, Group, Init, Wrap
from paralab.doctor.observation import Numbered, Observation, WatchedRank
from paralab.doctor.place import Place, Site
from paralab.doctor.source_context import DEPTH, opposite
from paralab.record.victims import MISMATCH, is_victim

UNSEEN = "a collective"  # the operation of a call that we did not see


def raised_of_its_own(rank: WatchedRank) -> bool:
    raised = rank.raised
    return raised is not None and not _is_consequence(f"{raised.type}: {raised.message}")


def _is_consequence(message: str) -> bool:
    return is_victim(message) or bool(MISMATCH.search(message))


@dataclass(frozen=True)
class Stuck:
    """A rank inside an operation that needs other ranks. It waits there, was killed there, or
    failed there because of another rank, with the message `failed`."""

    rank: WatchedRank
    operation: Numbered
    group: str
    number: int
    failed: str | None

    @property
    def place(self) -> Place | None:
        return self.operation.site.place if self.operation.site else None


@lru_cache(maxsize=64)
def find_stuck(rank: WatchedRank) -> Stuck | None:
    for operation in reversed(rank.doing if rank.settled else ()):
        if isinstance(operation, Numbered) and operation.seq and _is_waiting(rank, operation):
            return _make_stuck(rank, operation, None)
    last = next((e for e in reversed(rank.story) if isinstance(e, Numbered) and e.seq), None)
    if last is not None and last.error and _is_consequence(last.error):
        return _make_stuck(rank, last, last.error)
    return _find_stuck_in_library(rank)


def _find_stuck_in_library(rank: WatchedRank) -> Stuck | None:
    """Return the user's line that failed in a collective that we did not see, such as one of
    DTensor: it raised because of another rank, but none of the operations that we saw did."""
    raised = rank.raised
    if raised is None or not raised.stack or not is_victim(raised.message, raised.text):
        return None
    if any(event.error for event in rank.story):
        return None
    number = max(rank.collectives.get(DEFAULT_GROUP, ()), default=-1) + 1
    site = Site(tuple(Place(*place) for place in raised.stack[:DEPTH]))
    unseen = Collective(raised.t, site=site, op=UNSEEN, seq=[number, number])
    return _make_stuck(rank, unseen, raised.message)


def _is_waiting(rank: WatchedRank, operation: Numbered) -> bool:
    """Return whether a rank waits in an operation. During a long forward, backward, or wrap, the
    rank may just be computing. The Flight Recorder shows whether a collective is open, unless it is
    empty even though the rank ran collectives."""
    if isinstance(operation, Collective) or rank.answer is None:
        return True
    recorded = rank.answer.collectives
    return any(call.is_open for call in recorded) or (not recorded and bool(rank.collectives))


def _make_stuck(rank: WatchedRank, operation: Numbered, failed: str | None) -> Stuck:
    assert operation.seq
    group, number = group_of(operation), operation.seq[0]
    # The open call is a bucket of this operation.
    if rank.answer and not isinstance(operation, Collective):
        own = [call for call in rank.answer.collectives if call.is_open and call.group == group]
        number = max([number, *[call.number for call in own if call.number is not None][:1]])
    return Stuck(rank, operation, group, number, failed)


def group_of(operation: Numbered) -> str:
    return (operation.group if isinstance(operation, Collective) else None) or DEFAULT_GROUP


@lru_cache(maxsize=64)
def calls(rank: WatchedRank) -> list[CollectiveCall]:
    """Return every collective of a rank, including the one in which it is stuck."""
    found = {
        (group, number): _call(event, group, number)
        for group, numbered in rank.collectives.items()
        for number, event in numbered.items()
    }
    if where := find_stuck(rank):
        key = where.group, where.number
        found[key] = replace(found.get(key) or _call(where.operation, *key), is_open=True)
    return list(found.values())


def _call(event: Numbered, group: str, number: int) -> CollectiveCall:
    shape = dtype = peer = None
    if isinstance(event, Collective):
        dtype, peer = event.dtype, event.peer
        shape = None if event.shape is None or "object" in event.op else (tuple(event.shape),)
    return CollectiveCall(
        kind(event), group, number, shape, dtype, _site(event), peer=peer, record=event
    )


def _site(event: Numbered) -> object:
    """Return what identifies a call. Backward passes and wraps match even if their lines differ."""
    if isinstance(event, (Backward, Wrap)):
        return type(event)
    return (type(event), event.site) if event.site else None


@lru_cache(maxsize=1)
def mismatches(seen: Observation) -> list[Mismatch]:
    """Return where the ranks diverge, and which ranks are behind."""
    groups: list[Init | Group] = []
    for rank in seen.ranks:
        groups += [*rank.of(Init), *rank.of(Group)]
    members = {event.group: event.ranks for event in groups if event.group and event.ranks}
    calls_of = {rank.rank: calls(rank) for rank in seen.ranks}
    return find_mismatches(calls_of, members=members, differ=_differ)


def _differ(one: CollectiveCall, other: CollectiveCall) -> Difference | None:
    difference = differ(one, other)
    if difference == "size" and not (has_failed(one) or has_failed(other)):
        # Both calls succeeded, so their sizes may differ.
        difference = differ(replace(one, shapes=None), other)
    if difference == "site" and not (one.is_open or other.is_open) and fits(one, other):
        mine, its = one.record.site, other.record.site
        return None if mine and its and opposite(mine, its) else difference  # on purpose
    return difference


def has_failed(call: CollectiveCall) -> bool:
    return bool(call.is_open or call.record.error or call.record.seconds is None)


def fits(one: CollectiveCall, other: CollectiveCall) -> bool:
    """Return whether the backend would pair two calls: they have the same kind, shapes, root, and
    (for buffers) model."""
    models = {c.record.model for c in (one, other) if isinstance(c.record, Forward)}
    mine, its = ((each.kind, each.shapes, each.peer) for each in (one, other))
    return mine == its and len(models) < 2


def is_same_call(one: Numbered, other: Numbered) -> bool:
    mine, its = _site(one), _site(other)
    return type(one) is type(other) and (mine is None or its is None or mine == its)


def times_called(rank: WatchedRank, operation: Numbered) -> int:
    """Return how many times a rank has made this call, including a call that is still open."""
    events = (*rank.story, *rank.doing)
    return sum(is_same_call(operation, e) for e in events if isinstance(e, Numbered))


def kind(operation: Numbered) -> str:
    if isinstance(operation, Collective):
        return operation.op
    return "all_reduce" if isinstance(operation, Backward) else "broadcast"


def named(operation: Numbered) -> str:
    where = f" at {operation.site}" if operation.site else ""
    if isinstance(operation, Collective):
        return f"{_call(operation, '', 0)}{where}"
    words = {
        Forward: "the forward of the DDP model, which broadcasts its buffers,",
        Backward: "the backward pass, where DDP reduces the gradients,",
        Wrap: "DistributedDataParallel(…)",
    }
    return f"{words[type(operation)]}{where}"
