"""H02, H03, H08, H10, H12, H13: a rank never reached the call where other ranks wait. It left, was
killed or stopped, or is busy elsewhere."""

import math

from paralab.analyse.collective_matching import Mismatch
from paralab.analyse.stack_dumps import STOPPED
from paralab.doctor.events import Collective, Destroy, End, Exit, Forward, Init
from paralab.doctor.failures.hangs.different_calls import is_for_some_ranks, only_here
from paralab.doctor.failures.hangs.left_loops import early_exit, leaving
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Numbered, Observation, WatchedRank
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.rank_collectives import (
    Stuck,
    find_stuck,
    is_same_call,
    mismatches,
    named,
    times_called,
)
from paralab.doctor.source_context import Leaving, returns_before
from paralab.record.victims import WAITED


def did_not_come(seen: Observation) -> Finding | None:
    """Report the first collective that some ranks entered and another rank never called."""
    stuck_ranks = {
        rank.rank: where for rank in seen.ranks if (where := find_stuck(rank)) is not None
    }
    if seen.stalled_seconds is not None and not seen.ended_by_us:
        for rank in seen.ranks:
            victim = next((w for w in stuck_ranks.values() if w.rank is not rank), None)
            if rank.state in STOPPED and victim:
                return _stopped(victim, rank)
    for mismatch in mismatches(seen):
        waiting = [stuck_ranks[rank] for rank, call in mismatch.came if call.is_open]
        missing = [rank for rank in seen.ranks if rank.rank in mismatch.behind and waiting]
        for rank in sorted(missing, key=lambda rank: _last_number(mismatch, rank)):
            if finding := _absent(seen, waiting[0], rank):
                return finding
    return _nobody_is_missing(seen, list(stuck_ranks.values()))


def _last_number(mismatch: Mismatch, rank: WatchedRank) -> tuple[int, float]:
    """Return a sort key: the rank with the fewest collectives left first."""
    last, end = mismatch.last.get(rank.rank), rank.last(Exit) or rank.last(End)
    return (last.number or 0) if last else -1, end.t if end else math.inf


def describe_end(rank: WatchedRank) -> str:
    where = find_stuck(rank)
    if where is None:
        return f"rank {rank.rank}: ended with it"
    return f"rank {rank.rank}: {'failed' if where.failed else 'waits'} in {named(where.operation)}"


def _nobody_is_missing(seen: Observation, waiting: list[Stuck]) -> Finding | None:
    calls = {(where.group, where.number) for where in waiting}
    if seen.stalled_seconds is None or len(waiting) < seen.world or len(calls) != 1:
        return None
    operation = waiting[0].operation
    why = (
        f"All {len(waiting)} ranks have been in {named(operation)} for "
        f"{seen.stalled_seconds:.0f} s. No rank is missing, so the network between them is "
        "broken or very slow."
    )
    fix = "Check the network between the ranks: `paralab doctor` without arguments times an all-reduce."
    evidence = [describe_end(where.rank) for where in waiting]
    doubt = "if a small all_reduce between the same machines hangs too"
    return make_finding("H10", "suspect", why, operation, evidence, fix=fix, doubt=doubt)


def _absent(seen: Observation, where: Stuck, rank: WatchedRank) -> Finding | None:
    if seen.ended_by_us or rank.is_blind:
        return None  # that this rank is still alive proves nothing
    if rank.left is not None:
        return early_exit(rank, f"while rank {where.rank.rank} is in {named(where.operation)}")
    if rank.reached_end and not rank.raised:
        return _finished(seen, where, rank)
    elsewhere = find_stuck(rank)
    if elsewhere is not None and elsewhere.group != where.group:
        return None
    if rank.state in STOPPED:
        return _stopped(where, rank)
    timed_out = where.failed is not None and WAITED.search(where.failed) is not None
    if rank.lives is False and not timed_out and not rank.raised:
        return _killed(where, rank) if seen.stalled_seconds is not None or where.failed else None
    if rank.raised or not (timed_out or seen.stalled_seconds is not None):
        return None
    return _busy(seen, where, rank, timed_out)


def _finished(seen: Observation, where: Stuck, rank: WatchedRank) -> Finding:
    operation = where.operation
    times = times_called(rank, operation)
    if times == 0:
        in_order = rank.last(Destroy) is not None
        alone = isinstance(operation, Collective) and (in_order or is_for_some_ranks(operation))
        if alone or isinstance(operation, Forward):
            return only_here(seen, where.rank, operation, rank, None)
        return _returned(where, rank)
    story = [event for event in rank.story if isinstance(event, Numbered)]
    last = next((event for event in reversed(story) if is_same_call(operation, event)), None)
    went = f"rank {where.rank.rank} is in {named(operation)}"
    return leaving(rank, where.rank, last, f"after {times} rounds", went)


def _returned(where: Stuck, rank: WatchedRank) -> Finding:
    """Report a rank that exited without calling the collective in which the others wait."""
    way = _way_out(where, rank)
    how = f"at this `{way.kind}` under `if {way.condition.test}`" if way and way.condition else ""
    why = (
        f"Rank {rank.rank} reached the end of the program {how or 'without this call'}, while rank "
        f"{where.rank.rank} is in {named(where.operation)}. It exits without an "
        "exception, while the others fail."
    )
    ended = f"rank {rank.rank}: ended after {rank.made} optimizer steps"
    evidence = (ended, describe_end(where.rank))
    return make_finding("H02", "error", why, way.place if way else where.place, evidence, rank.rank)


def _way_out(where: Stuck, rank: WatchedRank) -> Leaving | None:
    """Return the last `return` between the rank's last known line and where the others wait."""
    visited = [place for event in rank.story if event.site for place in event.site.stack]
    for place in where.operation.site.stack if where.operation.site else ():
        own = [other.line for other in visited if other.is_in_function_of(place)]
        after = max((line for line in own if line < place.line), default=0)
        if ways := returns_before(place, after):
            return ways[-1]
    return None


def _killed(where: Stuck, rank: WatchedRank) -> Finding:
    why = (
        f"The process of rank {rank.rank} disappeared without an exception, so something killed "
        "it: the kernel (out of memory), a scheduler limit, or kill -9. Its last known line is "
        f"{rank.last_place}."
    )
    ended = f"rank {rank.rank}: {rank.made} optimizer steps, then nothing"
    evidence = (ended, describe_end(where.rank))
    return make_finding("H12", "error", why, None, evidence, rank.rank)


def _stopped(where: Stuck, rank: WatchedRank) -> Finding:
    at = rank.answer.where if rank.answer and rank.answer.where else str(rank.last_place)
    why = (
        f"Rank {rank.rank} {STOPPED[rank.state or '']}, at {at}; rank {where.rank.rank} waits for it in "
        f"{named(where.operation)}."
    )
    fix = "Resume the process (kill -CONT), or find out what stopped it."
    end = describe_end(where.rank)
    return make_finding("H10", "error", why, where.place, end, rank.rank, fix=fix)


def _busy(seen: Observation, where: Stuck, rank: WatchedRank, timed_out: bool) -> Finding:
    known = rank.answer.where if rank.answer else None
    at = f"at {known}" if known else f"after {rank.last_place}"
    init = where.rank.last(Init)
    limit = init.timeout_seconds if init else None
    timeout = f"{limit:g} s" if limit else "30 minutes by default"
    waited = where.operation.seconds or seen.stalled_seconds or 0.0
    over = "and timed out" if timed_out else f"(timeout: {timeout})"
    why = (
        f"Rank {rank.rank} is busy elsewhere, {at}, and rank {where.rank.rank} has waited {waited:.0f} s "
        f"for it in {named(where.operation)} {over}."
    )
    doubt = "" if timed_out else f"if rank {rank.rank} is still busy after {timeout}"
    evidence = (f"rank {rank.rank}: {at}", describe_end(where.rank))
    return make_finding("H13", "error", why, where.place, evidence, rank.rank, doubt=doubt)
