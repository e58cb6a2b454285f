"""H03, H04, H06, H07: ranks whose collectives with the same number differ."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from paralab.analyse.collective_matching import CollectiveCall, Mismatch, differ
from paralab.doctor.events import Collective, Forward, Wrap
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.observation import Numbered, Observation, WatchedRank
from paralab.doctor.passes import passes
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.rank_collectives import (
    calls,
    fits,
    has_failed,
    mismatches,
    named,
    stuck,
    times_called,
)
from paralab.doctor.source_context import opposite, site_conditions


def made_different_calls(seen: Observation) -> Finding | None:
    if not seen.settled and _one_may_have_left(seen):
        return None  # this is the cause; it is certain once the other ranks have moved on
    for mismatch in mismatches(seen):
        if mismatch.kind == "behind":
            continue
        one, other = _pair(seen, mismatch)
        mine, its = mismatch.calls[one.rank], mismatch.calls[other.rank]
        assert mine is not None
        assert its is not None
        if mismatch.kind == "size":
            return _sizes(one, mine, other, its)
        if mismatch.kind == "groups":
            return _order("in different groups", one, mine.record, other, its.record)
        if finding := _judge(seen, mismatch, (one, mine), (other, its)):
            return finding
    return _sizes_that_went_through(seen)


def different_sizes(seen: Observation) -> Finding | None:
    """Report the first mismatch if the sizes differ. A rank that returned from such a call has
    meaningless numbers and may fail anywhere."""
    first = next(iter(mismatches(seen)), None)
    if first is None or first.kind != "size":
        return None
    one, other = _pair(seen, first)
    mine, its = first.calls[one.rank], first.calls[other.rank]
    return _sizes(one, mine, other, its) if mine and its else None


def _pair(seen: Observation, mismatch: Mismatch) -> tuple[WatchedRank, WatchedRank]:
    one, other = (seen.rank(number) for number in mismatch.pair)
    assert one is not None
    assert other is not None
    return one, other


def _one_may_have_left(seen: Observation) -> bool:
    """Return whether one rank left a pass over the data early while another is still in it."""
    left: dict[tuple[int, int], set[bool]] = {}
    for rank in seen.ranks:
        for key, each in passes(rank).items():
            left.setdefault(key, set()).add(each.over and not each.exhausted)
    return any(len(ways) > 1 for ways in left.values())


def _judge(
    seen: Observation,
    mismatch: Mismatch,
    one_side: tuple[WatchedRank, CollectiveCall],
    other_side: tuple[WatchedRank, CollectiveCall],
) -> Finding | None:
    """Report the rank whose call is wrong: the call that the other rank never makes."""
    (one, my_call), (other, its_call) = one_side, other_side
    mine, its = my_call.record, its_call.record
    clashes = not fits(my_call, its_call)
    waits = [
        where for rank in seen.ranks if (where := stuck(rank)) and where.group == mismatch.group
    ]
    certain = clashes or any(where.number >= (mismatch.number or 0) for where in waits)
    sides = ((one, mine, other, its), (other, its, one, mine))
    shared = [times_called(far, own) > 0 for _, own, far, _ in sides]
    for side, is_shared, is_other_shared in zip(sides, shared, reversed(shared), strict=True):
        if is_other_shared and not is_shared:
            return only_here(seen, *side, certain)
    if not certain:
        return None

    if not shared[0] and not (mine.site and its.site and opposite(mine.site, its.site)):
        for is_alone in (is_for_some_ranks, _evaluates):
            for side in sides:
                if is_alone(side[1]) and not is_alone(side[3]):
                    return only_here(seen, *side)
    if clashes or isinstance(mine, Collective):
        return _order(f"number {mismatch.number}", one, mine, other, its)
    return None


def is_for_some_ranks(operation: Numbered) -> bool:
    """Return whether the call is under a condition on the rank."""
    conditions = site_conditions(operation.site) if operation.site else []
    return any(condition.is_about_the_rank for condition in conditions)


def _evaluates(operation: Numbered) -> bool:
    """Return whether no backward follows a forward: one rank may run such a forward alone on
    purpose."""
    return isinstance(operation, Forward) and not (operation.training and operation.grad)


def only_here(
    seen: Observation,
    rank: WatchedRank,
    own: Numbered,
    other: WatchedRank,
    its: Numbered | None,
    certain: bool = True,
) -> Finding:
    """Report a call that only one of two ranks makes."""
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
    id, evidence = "H07" if isinstance(own, Forward) else "H03", _evidence(rank, own, other, its)
    return make_finding(id, "error", why, own, evidence, rank.rank, doubt=doubt)


def _order(
    which: str, one: WatchedRank, mine: Numbered, other: WatchedRank, its: Numbered
) -> Finding:
    why = (
        f"Collective {which} is {named(mine)} on rank {one.rank}, but {named(its)} on rank "
        f"{other.rank}. Ranks match collectives by their order, so these two hang or mix their data."
    )
    return make_finding("H04", "error", why, mine, _evidence(one, mine, other, its))


def _sizes_that_went_through(seen: Observation) -> Finding | None:
    """Report different sizes that gloo did not detect. The results may still be wrong."""
    numbered = [(rank, {(c.group, c.number): c for c in calls(rank)}) for rank in seen.ranks]
    for (one, own), (other, others) in combinations(numbered, 2):
        for key, mine in own.items():
            its = others.get(key)
            if its is not None and differ(mine, replace(its, site=mine.site)) == "size":
                return _sizes(one, mine, other, its)
    return None


def _sizes(
    one: WatchedRank, mine: CollectiveCall, other: WatchedRank, its: CollectiveCall
) -> Finding:
    a, b = mine.record, its.record
    failed = has_failed(mine) or has_failed(its)
    why = (
        f"{a.op} gets {a.shape} {a.dtype} on rank {one.rank} and {b.shape} {b.dtype} on rank "
        f"{other.rank}, but it needs the same size on all ranks."
    )
    if not failed:
        why += " It worked this time, but another backend or size may fail or give wrong numbers."
    severity: Severity = "error" if failed else "suspect"
    return make_finding("H06", severity, why, a, _evidence(one, a, other, b))


def _evidence(
    one: WatchedRank, mine: Numbered, other: WatchedRank, its: Numbered | None
) -> tuple[str, str]:
    def line(rank: WatchedRank, operation: Numbered) -> str:
        code = f": {operation.site.place.code}" if operation.site else ""
        return f"rank {rank.rank}: {named(operation)}{code}"

    ended = f"rank {other.rank}: ended after {other.made} optimizer steps"
    return line(one, mine), line(other, its) if its is not None else ended
