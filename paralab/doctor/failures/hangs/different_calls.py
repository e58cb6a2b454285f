"""H03, H04, H06, H07: ranks whose collectives with the same number differ."""

from dataclasses import dataclass, replace
from itertools import combinations

from paralab.analyse.collective_matching import CollectiveCall, Mismatch, differ
from paralab.doctor.events import Collective, Forward, Wrap
from paralab.doctor.observation import Numbered, Observation, WatchedRank
from paralab.doctor.passes import passes
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.rank_collectives import (
    calls,
    find_stuck,
    fits,
    has_failed,
    mismatches,
    named,
    times_called,
)
from paralab.doctor.registry import Finding
from paralab.doctor.source_context import opposite, site_conditions
from paralab.record.collective_arguments import POINT_TO_POINT


@dataclass(frozen=True)
class Side:
    """One of two ranks whose calls differ, and its call."""

    rank: WatchedRank
    call: CollectiveCall

    @property
    def operation(self) -> Numbered:
        operation: Numbered = self.call.record
        return operation


def made_different_calls(seen: Observation) -> Finding | None:
    if not seen.settled and _one_may_have_left(seen):
        return None  # leaving may be the cause; wait until the other ranks have moved on
    for mismatch in mismatches(seen):
        if mismatch.kind == "behind":
            continue
        one, other = _sides(seen, mismatch)
        if mismatch.kind == "size":
            return _sizes(one, other)
        if mismatch.kind == "groups":
            return _order("in different groups", one, other)
        if finding := _judge(seen, mismatch, one, other):
            return finding
    return _sizes_that_went_through(seen)


def different_sizes(seen: Observation) -> Finding | None:
    """Report the first mismatch if the sizes differ. A rank that returned from a call with
    different sizes has meaningless numbers and may fail anywhere."""
    first = next(iter(mismatches(seen)), None)
    return _sizes(*_sides(seen, first)) if first and first.kind == "size" else None


def wait_for_each_other(seen: Observation) -> Finding | None:
    """Report a hang in which ranks wait for each other: two ranks that both receive, or a receive
    while the sender is in a barrier."""
    waits = {rank.rank: each for rank in seen.ranks if (each := _waits_in(rank)) is not None}
    if seen.stalled_seconds is None or len(waits) < seen.world:
        return None
    for rank, own in waits.items():
        if not isinstance(own, Collective) or own.op not in POINT_TO_POINT or own.peer is None:
            continue
        its = waits[own.peer]
        if isinstance(its, Collective) and its.peer == rank and its.op != own.op:
            continue  # a send and its receive
        why = (
            f"Rank {rank} is in {named(own)}, but rank {own.peer} is in {named(its)}. All ranks "
            "wait for each other, and none of them continues."
        )
        evidence = [f"rank {number}: {named(each)}" for number, each in waits.items()]
        fix = "Post the receives first (dist.irecv), or let one rank of each pair send first."
        return make_finding("H04", "error", why, own, evidence, fix=fix)
    return None


def _waits_in(rank: WatchedRank) -> Numbered | None:
    inner = rank.doing[-1] if rank.doing else None
    if isinstance(inner, Collective):
        return inner
    where = find_stuck(rank) if rank.answer else None  # otherwise, it may just be computing
    return where.operation if where else None


def _sides(seen: Observation, mismatch: Mismatch) -> tuple[Side, Side]:
    made = dict(mismatch.came)
    sides = {rank.rank: Side(rank, made[rank.rank]) for rank in seen.ranks if rank.rank in made}
    one, other = mismatch.pair
    return sides[one], sides[other]


def _one_may_have_left(seen: Observation) -> bool:
    """Return whether one rank left a pass over the data early while another is still in it."""
    left: dict[tuple[int, int], set[bool]] = {}
    for rank in seen.ranks:
        for key, each in passes(rank).items():
            left.setdefault(key, set()).add(each.over and not each.exhausted)
    return any(len(ways) > 1 for ways in left.values())


def _judge(seen: Observation, mismatch: Mismatch, one: Side, other: Side) -> Finding | None:
    """Report the rank whose call is wrong: the call that the other rank never makes."""
    clashes = not fits(one.call, other.call)
    waits = [w for rank in seen.ranks if (w := find_stuck(rank)) and w.group == mismatch.group]
    certain = clashes or any(where.number >= (mismatch.number or 0) for where in waits)
    pairs = ((one, other), (other, one))
    shared = [times_called(far.rank, near.operation) > 0 for near, far in pairs]
    for (near, far), is_shared, is_other_shared in zip(pairs, shared, shared[::-1], strict=True):
        if is_other_shared and not is_shared:
            return only_here(seen, near.rank, near.operation, far.rank, far.operation, certain)
    if not certain:
        return None

    mine, its = one.operation, other.operation
    if not shared[0] and not (mine.site and its.site and opposite(mine.site, its.site)):
        for is_alone in (is_for_some_ranks, _evaluates):
            for near, far in pairs:
                if is_alone(near.operation) and not is_alone(far.operation):
                    return only_here(seen, near.rank, near.operation, far.rank, far.operation)
    if clashes or isinstance(mine, Collective):
        return _order(f"number {mismatch.number}", one, other)
    return None


def is_for_some_ranks(operation: Numbered) -> bool:
    conditions = site_conditions(operation.site) if operation.site else []
    return any(condition.is_about_the_rank for condition in conditions)


def _evaluates(operation: Numbered) -> bool:
    return isinstance(operation, Forward) and not (operation.training and operation.grad)


def only_here(
    seen: Observation,
    rank: WatchedRank,
    own: Numbered,
    other: WatchedRank,
    its: Numbered | None,
    certain: bool = True,
) -> Finding:
    meanwhile = "never calls it" if its is None else f"is in {named(its)}"
    if isinstance(own, Forward):
        wraps = [wrap for one in seen.ranks for wrap in one.of(Wrap) if wrap.model == own.model]
        names = next((wrap.buffers for wrap in wraps if wrap.buffers), [])
        buffers = f"its {len(names)} buffers ({', '.join(names[:2])} …)" if names else "its buffers"
        why = (
            f"Only rank {rank.rank} calls the DDP model here. Its forward broadcasts {buffers} from rank 0 "
            f"to all ranks, but rank {other.rank} {meanwhile}."
        )
    else:
        why = f"Only rank {rank.rank} calls {named(own)}, which needs all ranks. Rank {other.rank} {meanwhile}."
    doubt = "" if certain else "if a rank fails or hangs afterward"
    id, evidence = (
        "H07" if isinstance(own, Forward) else "H03",
        (_line(rank, own), _line(other, its)),
    )
    return make_finding(id, "error", why, own, evidence, rank.rank, doubt=doubt)


def _order(which: str, one: Side, other: Side) -> Finding:
    why = (
        f"Collective {which} is {named(one.operation)} on rank {one.rank.rank}, but "
        f"{named(other.operation)} on rank {other.rank.rank}. Ranks match collectives by their order, "
        "so these two hang or mix up their data."
    )
    return make_finding("H04", "error", why, one.operation, _evidence(one, other))


def _sizes_that_went_through(seen: Observation) -> Finding | None:
    """Report different sizes that gloo did not detect. The results may still be wrong."""
    made = [{(c.group, c.number): Side(rank, c) for c in calls(rank)} for rank in seen.ranks]
    for own, others in combinations(made, 2):
        for key, mine in own.items():
            its = others.get(key)
            if its and differ(mine.call, replace(its.call, site=mine.call.site)) == "size":
                return _sizes(mine, its)
    return None


def _sizes(one: Side, other: Side) -> Finding:
    a, b = one.call.record, other.call.record
    failed = has_failed(one.call) or has_failed(other.call)
    why = (
        f"{a.op} gets {a.shape} {a.dtype} on rank {one.rank.rank} and {b.shape} {b.dtype} on rank "
        f"{other.rank.rank}, but it needs the same size on all ranks."
    )
    if not failed:
        why += " It worked this time, but another backend or size may fail or give wrong numbers."
    return make_finding("H06", "error" if failed else "suspect", why, a, _evidence(one, other))


def _evidence(*sides: Side) -> list[str]:
    return [_line(side.rank, side.operation) for side in sides]


def _line(rank: WatchedRank, operation: Numbered | None) -> str:
    if operation is None:
        return f"rank {rank.rank}: ended after {rank.made} optimizer steps"
    code = f": {operation.site.place.code}" if operation.site else ""
    return f"rank {rank.rank}: {named(operation)}{code}"
