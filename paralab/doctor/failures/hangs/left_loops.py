"""H01, H02, H08: a rank leaves a loop, or exits, while the others continue."""

from itertools import permutations

from paralab.doctor.events import Join
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Numbered, Observation, WatchedRank
from paralab.doctor.passes import Pass, passes
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.rank_collectives import raised_of_its_own
from paralab.doctor.source_context import ways_out_of_loops

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
                report = _uneven if one.exhausted else _left
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


def _left(fewer: WatchedRank, mine: Pass, more: WatchedRank, its: Pass) -> Finding:
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
    """Report a rank that left a loop while another rank is still in it: H02 if the decision depends
    on the rank number or the rank exited, else H08. `ways_out_of_loops` explains `loop_line`
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
