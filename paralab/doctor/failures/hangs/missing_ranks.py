"""H01, H02, H03, H08, H10, H12, H13: a rank leaves a loop or exits while others continue, or never
reaches the call where they wait. It left, was killed or stopped, or is busy elsewhere."""

import math
from itertools import permutations

from paralab.analyse.collective_matching import Mismatch
from paralab.analyse.stack_dumps import STOPPED
from paralab.doctor.events import Collective, Destroy, End, Exit, Forward, Init, Join
from paralab.doctor.failures.hangs.different_calls import is_for_some_ranks, only_here
from paralab.doctor.observation import Numbered, Observation, WatchedRank
from paralab.doctor.passes import Pass, passes
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.rank_collectives import (
    UNSEEN,
    Stuck,
    find_stuck,
    is_same_call,
    mismatches,
    named,
    raised_of_its_own,
    times_called,
)
from paralab.doctor.registry import Finding
from paralab.doctor.source_context import Leaving, returns_before, ways_out_of_loops
from paralab.record.victims import WAITED

Passes = dict[tuple[int, int], Pass]


def left_their_loops(seen: Observation) -> Finding | None:
    """Report the rank that left a pass over the data first, before another rank's last collective.
    A rank may leave a later pass as a consequence."""
    if any(rank.of(Join) for rank in seen.ranks):
        return None  # `with model.join()` permits this
    own = {rank.rank: passes(rank) for rank in seen.ranks}
    departures: list[tuple[int, int, Finding]] = []
    for fewer, more in permutations(seen.ranks, 2):
        if raised_of_its_own(fewer) or fewer.is_blind:
            continue
        mine, its = own[fewer.rank], own[more.rank]
        for place, (key, one) in enumerate(mine.items()):
            other = its.get(key)
            if other is not None and one.over and other.reached > one.batches > 0:
                report = _uneven if one.exhausted else _left_early
                departures.append((place, one.batches, report(fewer, one, more, other)))
        # Ranks that we stopped may raise and exit as a consequence.
        if not (seen.ended_by_us and fewer.raised) and (
            finding := _fewer_passes(fewer, mine, more, its)
        ):
            departures.append((len(mine), 0, finding))
    return min(departures, key=lambda one: one[:2])[2] if departures else None


def _uneven(fewer: WatchedRank, mine: Pass, more: WatchedRank, its: Pass) -> Finding:
    length = its.loader.batches
    went = f"continued to batch {its.reached}" if length is None else f"has {length}"
    why = (
        f"Rank {fewer.rank} has {mine.batches} batches in pass {mine.loader.epoch} over this loader, "
        f"and rank {more.rank} {went}. In batch {mine.batches + 1}, rank {more.rank} waits for gradients "
        f"that rank {fewer.rank} never computes."
    )
    return make_finding("H01", "error", why, mine.loader, rank=fewer.rank)


def _left_early(fewer: WatchedRank, mine: Pass, more: WatchedRank, its: Pass) -> Finding:
    after = f"after batch {mine.batches} of pass {mine.loader.epoch}"
    went = f"rank {more.rank} continued to batch {its.reached}"
    line = mine.loader.site.line if mine.loader.site else None
    return leaving(fewer, more, mine.last_collective, after, went, line)


def _fewer_passes(
    fewer: WatchedRank, mine: Passes, more: WatchedRank, its: Passes
) -> Finding | None:
    """Report a rank that exited after fewer passes over a loader than another rank."""
    if not fewer.reached_end:
        return None
    for (loader, epoch), extra in its.items():
        last = mine.get((loader, epoch - 1))
        if not extra.reached or (loader, epoch) in mine or last is None or not last.last_collective:
            continue
        line = last.loader.site.line if last.loader.site else None
        after = f"after pass {epoch - 1} over the data"
        went = f"rank {more.rank} began pass {epoch}"
        whole = last.exhausted is not None
        return leaving(fewer, more, last.last_collective, after, went, line, whole)
    return None


def leaving(
    fewer: WatchedRank,
    more: WatchedRank,
    last: Numbered | None,
    after: str,
    went: str,
    loop_line: int | None = None,
    only_around: bool = False,
) -> Finding:
    """Report a rank that left a loop while another rank is still in it. This is H02 if the decision
    depends on the rank number or the rank exited, else H08. See `ways_out_of_loops` for `loop_line`
    and `only_around`."""
    if fewer.left is not None:
        return early_exit(fewer, f"{after}, while {went}")
    ways = ways_out_of_loops(last.site, loop_line, only_around) if last and last.site else []
    way = ways[0] if len({each.place for each in ways}) == 1 else None
    condition = way.condition if way else None
    by_rank = condition is not None and condition.is_about_the_rank
    exited = fewer.reached_end and bool(ways) and all(each.kind == "exit" for each in ways)
    how = f" by `{way.kind}` under `if {condition.test}`" if way and condition else ""
    how += "; multiple statements could have caused it" if ways and not way else ""
    what = "is true only on some ranks" if by_rank else "uses a value that differs between ranks"
    why = (
        f"Rank {fewer.rank} left the training loop {after}{how}, while {went}. The condition "
        f"{what}. The other ranks wait forever."
    )
    fix = (
        "Make the decision together: stop = torch.tensor(float(condition)); "
        "dist.all_reduce(stop, op=dist.ReduceOp.MAX); if stop.item(): break"
    )
    made = [f"rank {rank.rank}: {rank.made} optimizer steps" for rank in (fewer, more)]
    evidence = (made[0], f"{made[1]}, {went}")
    id, at = "H02" if by_rank or exited else "H08", way.place if way else last
    return make_finding(id, "error", why, at, evidence, fewer.rank, fix=fix)


def early_exit(rank: WatchedRank, when: str) -> Finding:
    left = rank.left
    assert left is not None
    call = f"{left.call}({left.code})"
    why = (
        f"Rank {rank.rank} exits here with {call} {when}. It does not print an error, and the "
        "other ranks fail with a closed connection or wait forever."
    )
    return make_finding("H02", "error", why, left, rank=rank.rank)


def did_not_come(seen: Observation) -> Finding | None:
    """Report the first collective that some ranks entered and another rank never called."""
    stuck_ranks = {
        rank.rank: where for rank in seen.ranks if (where := find_stuck(rank)) is not None
    }
    if seen.stalled_seconds is not None and not seen.ended_by_us:
        for rank in seen.ranks:
            victim = next((w for w in stuck_ranks.values() if w.rank is not rank), None)
            if rank.state in STOPPED and victim:
                return _rank_stopped(victim, rank)
    for mismatch in mismatches(seen):
        waiting = [stuck_ranks[rank] for rank, call in mismatch.came if call.is_open]
        missing = [rank for rank in seen.ranks if rank.rank in mismatch.behind and waiting]
        for rank in sorted(missing, key=lambda rank: _last_number(mismatch, rank)):
            if finding := _absent(seen, waiting[0], rank):
                return finding
    return _nobody_is_missing(seen, list(stuck_ranks.values()))


def _last_number(mismatch: Mismatch, rank: WatchedRank) -> tuple[int, float]:
    """Return a sort key that puts the rank that exited after the fewest collectives first."""
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
        return _rank_finished(seen, where, rank)
    elsewhere = find_stuck(rank)
    if elsewhere is not None and elsewhere.group != where.group:
        return None
    if rank.state in STOPPED:
        return _rank_stopped(where, rank)
    timed_out = where.failed is not None and WAITED.search(where.failed) is not None
    if rank.lives is False and not timed_out and not rank.raised:
        return (
            _rank_killed(where, rank) if seen.stalled_seconds is not None or where.failed else None
        )
    if rank.raised or not (timed_out or seen.stalled_seconds is not None):
        return None
    return _busy(seen, where, rank, timed_out)


def _rank_finished(seen: Observation, where: Stuck, rank: WatchedRank) -> Finding:
    operation = where.operation
    times = times_called(rank, operation)
    if times == 0:
        is_unseen = isinstance(operation, Collective) and operation.op == UNSEEN
        in_order = rank.last(Destroy) is not None and not is_unseen
        alone = isinstance(operation, Collective) and (in_order or is_for_some_ranks(operation))
        if alone or isinstance(operation, Forward):
            return only_here(seen, where.rank, operation, rank, None)
        return _rank_returned(where, rank)
    story = [event for event in rank.story if isinstance(event, Numbered)]
    last = next((event for event in reversed(story) if is_same_call(operation, event)), None)
    went = f"rank {where.rank.rank} is in {named(operation)}"
    return leaving(rank, where.rank, last, f"after {times} rounds", went)


def _rank_returned(where: Stuck, rank: WatchedRank) -> Finding:
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
    """Return the last `return` between the rank's last known line and the line where the others
    wait."""
    visited = [place for event in rank.story if event.site for place in event.site.stack]
    for place in where.operation.site.stack if where.operation.site else ():
        own = [other.line for other in visited if other.is_in_function_of(place)]
        after = max((line for line in own if line < place.line), default=0)
        if ways := returns_before(place, after):
            return ways[-1]
    return None


def _rank_killed(where: Stuck, rank: WatchedRank) -> Finding:
    why = (
        f"The process of rank {rank.rank} disappeared without an exception, so something killed "
        "it: the kernel (out of memory), a scheduler limit, or kill -9. Its last known line is "
        f"{rank.last_place}."
    )
    ended = f"rank {rank.rank}: {rank.made} optimizer steps, then nothing"
    evidence = (ended, describe_end(where.rank))
    return make_finding("H12", "error", why, None, evidence, rank.rank)


def _rank_stopped(where: Stuck, rank: WatchedRank) -> Finding:
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
