"""Ranks that came apart: one made fewer rounds of a loop, or another call than its partner under
the same number."""

from __future__ import annotations

from paralab.doctor.events import Collective, Forward, Join, Wrap
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.lines import Leaving, opposite, site_conditions, ways_out_of_loops
from paralab.doctor.meetings import (
    Difference,
    at,
    calls_from,
    differences,
    kind,
    members,
    named,
    raised_of_its_own,
    reached,
    stuck,
)
from paralab.doctor.observation import Numbered, Observation, RankSeen
from paralab.doctor.passes import Pass, passes

SAME_SIZE = {
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "reduce_scatter_tensor",
}


# --- loops
# -----------------------------------------------------------------------------------------------------------------------


def left_their_loops(seen: Observation) -> Finding | None:
    """In one pass over the data a rank met the others in a later batch than another rank that has
    left the pass."""
    if any(rank.of(Join) for rank in seen.ranks):
        return None  # `with model.join()` is made for this
    all_passes = {rank.rank: passes(rank) for rank in seen.ranks}
    for fewer in seen.ranks:
        if raised_of_its_own(fewer) or fewer.is_blind:
            continue
        for more in seen.ranks:
            for key, mine in all_passes[fewer.rank].items():
                its = all_passes[more.rank].get(key)
                if its is not None and mine.over and its.met_in > mine.batches > 0:
                    return (
                        _uneven(fewer, mine, more, its)
                        if mine.exhausted
                        else _left(fewer, mine, more, its)
                    )
            if found := _fewer_passes(fewer, all_passes[fewer.rank], more, all_passes[more.rank]):
                return found
    return None


def _uneven(fewer: RankSeen, mine: Pass, more: RankSeen, its: Pass) -> Finding:
    site = mine.loader.site
    went = (
        f"went on to batch {its.met_in}"
        if its.loader.batches is None
        else f"has {its.loader.batches}"
    )
    return Finding(
        "H01",
        "error",
        f"rank {fewer.rank} has {mine.batches} batches in pass {mine.loader.epoch} over this loader, rank {more.rank} {went}: "
        "in batch "
        f"{mine.batches + 1} rank {more.rank} reduces gradients with a rank that is no longer there",
        "give every rank the same number of batches: DistributedSampler(…, drop_last=True), or drop_last=True in the "
        "DataLoader of equal "
        "shards, or train inside `with model.join():`",
        site.file if site else None,
        site.line if site else None,
        fewer.rank,
        (
            f"rank {fewer.rank}: len(loader) = {mine.loader.batches}, batches taken = {mine.batches}",
            f"rank {more.rank}: len(loader) = {its.loader.batches}, met the others in batch {its.met_in}",
        ),
    )


def _left(fewer: RankSeen, mine: Pass, more: RankSeen, its: Pass) -> Finding:
    after = f"after batch {mine.batches} of pass {mine.loader.epoch}"
    met = f"rank {more.rank} went on to batch {its.met_in}"
    return leaving(
        fewer,
        more,
        mine.last_meeting,
        mine.loader.site.line if mine.loader.site else None,
        False,
        after,
        met,
    )


def _fewer_passes(
    fewer: RankSeen,
    mine: dict[tuple[int, int], Pass],
    more: RankSeen,
    its: dict[tuple[int, int], Pass],
) -> Finding | None:
    """It ended its program after fewer passes over a loader in which the ranks meet."""
    if not fewer.came_to_its_end:
        return None
    for (loader, epoch), extra in its.items():
        last = mine.get((loader, epoch - 1))
        if (
            extra.met_in
            and (loader, epoch) not in mine
            and last is not None
            and last.last_meeting is not None
        ):
            line = last.loader.site.line if last.loader.site else None
            whole = last.exhausted is not None
            met = f"rank {more.rank} began pass {epoch}"
            return leaving(
                fewer,
                more,
                last.last_meeting,
                line,
                whole,
                f"after pass {epoch - 1} over the data",
                met,
            )
    return None


def leaving(
    fewer: RankSeen,
    more: RankSeen,
    last: Numbered | None,
    loop_line: int | None,
    only_around: bool,
    after: str,
    met: str,
) -> Finding:
    """A rank left a loop that the other one is still in: H02 if its rank decides or it left the
    program, else H08."""
    if fewer.left is not None:
        return early_exit(fewer, f"{after}, while {met}")
    ways = ways_out_of_loops(last.site, loop_line, only_around) if last and last.site else []
    way: Leaving | None = ways[0] if len({each.place for each in ways}) == 1 else None
    by_rank = way is not None and way.condition is not None and way.condition.is_about_the_rank
    place = way.place if way else (last.site.place if last and last.site else None)
    told = f" by `{way.kind}` under `if {way.condition.test}`" if way and way.condition else ""
    more_told = "" if way else "; several statements could have done it" if ways else ""
    what = (
        "which is true on some ranks only"
        if by_rank
        else "a value that every rank computes for itself"
    )
    return Finding(
        "H02" if by_rank else "H08",
        "error",
        f"rank {fewer.rank} left the training loop {after}{told}{more_told}, while {met}: the condition is {what}, so the "
        "others wait "
        "for a rank that does not come any more",
        "decide together: stop = torch.tensor(float(condition)); dist.all_reduce(stop, op=dist.ReduceOp.MAX); if stop.item(): "
        "break",
        place.file if place else None,
        place.line if place else None,
        fewer.rank,
        (
            f"rank {fewer.rank}: {fewer.made} optimizer steps",
            f"rank {more.rank}: {more.made} optimizer steps, {met}",
        ),
    )


def early_exit(rank: RankSeen, when: str) -> Finding:
    left = rank.left
    assert left is not None
    return Finding(
        "H02",
        "error",
        f"rank {rank.rank} leaves the program here with {left.call}({left.code}) {when}: it prints no error, and the others "
        "fail in its "
        "place with a closed connection, or wait",
        "let all ranks leave together: agree on a flag with dist.all_reduce, then call dist.destroy_process_group() on all of them",
        left.site.file if left.site else None,
        left.site.line if left.site else None,
        rank.rank,
        (f"rank {rank.rank}: {left.call}({left.code}) after {rank.made} optimizer steps",),
    )


# --- calls
# -----------------------------------------------------------------------------------------------------------------------


def made_different_calls(seen: Observation) -> Finding | None:
    """Two ranks met under one number with different calls, or with different sizes."""
    if not seen.settled and _one_may_have_left(seen):
        return None  # then that is the cause, which is certain when the others have gone on
    found = sorted(differences(seen), key=lambda d: d.number)
    for difference in found:
        if finding := _judged(seen, difference):
            return finding
    return different_sizes(seen)


def _one_may_have_left(seen: Observation) -> bool:
    """One rank has left a pass over the data before its end, another is still in it."""
    left: dict[tuple[int, int], set[bool]] = {}
    for rank in seen.ranks:
        for key, each in passes(rank).items():
            left.setdefault(key, set()).add(each.over and not each.exhausted)
    return any(len(ways) > 1 for ways in left.values())


def _judged(seen: Observation, d: Difference) -> Finding | None:
    on_the_wire = _wire(d.mine) != _wire(d.its)
    trouble = any(
        (where := stuck(rank)) and where.group == d.group and where.number >= d.number
        for rank in members(seen, d.group)
    )
    apart = d.mine.site is not None and d.its.site is not None and opposite(d.mine.site, d.its.site)
    if apart and not on_the_wire and not trouble:
        return None  # the two sides of one `if`, which fit
    mine_is_common, its_is_common = calls_from(d.other, d.mine) > 0, calls_from(d.one, d.its) > 0
    severity: Severity = "error" if on_the_wire or trouble else "suspect"
    if its_is_common and not mine_is_common:
        return only_here(seen, d.one, d.mine, d.other, d.its, severity)
    if mine_is_common and not its_is_common:
        return only_here(seen, d.other, d.its, d.one, d.mine, severity)
    if not on_the_wire and not trouble:
        return None
    if not mine_is_common and not apart:
        sides = ((d.one, d.mine, d.other, d.its), (d.other, d.its, d.one, d.mine))
        for is_alone in (is_for_some_ranks, _evaluates):
            for rank, own, other, its in sides:
                if is_alone(own) and not is_alone(its):
                    return only_here(seen, rank, own, other, its, severity)
    return _order(d) if on_the_wire or isinstance(d.mine, Collective) else None


def is_for_some_ranks(operation: Numbered) -> bool:
    """It stands under a condition on the rank."""
    return operation.site is not None and any(
        c.is_about_the_rank for c in site_conditions(operation.site)
    )


def _evaluates(operation: Numbered) -> bool:
    """A forward that no backward follows, which one rank may well make alone."""
    return isinstance(operation, Forward) and not (operation.training and operation.grad)


def only_here(
    seen: Observation,
    rank: RankSeen,
    own: Numbered,
    other: RankSeen,
    its: Numbered | None,
    severity: Severity = "error",
) -> Finding:
    """A call that one rank makes and the other does not."""
    forward = isinstance(own, Forward)
    meanwhile = (
        f"rank {other.rank} is at {named(its)}"
        if its is not None
        else f"rank {other.rank} never comes to it"
    )
    unsure = (
        "" if severity == "error" else ". It would be certain if a rank failed or hung after it"
    )
    if forward:
        why = (
            f"rank {rank.rank} alone calls the DDP model here, whose forward broadcasts {_buffers(seen, own)} from rank 0 to "
            "all ranks; "
            f"{meanwhile}, and takes that message for another"
        )
        fix = "validate on all ranks, or call model.module(…) in the branch of one rank"
    else:
        why = f"rank {rank.rank} alone calls {named(own)}, which needs all ranks; {meanwhile}"
        fix = "let all ranks make this call, and keep only the work of one rank (printing, saving) under the condition"
    return Finding(
        "H07" if forward else "H03",
        severity,
        why + unsure,
        fix,
        own.site.file if own.site else None,
        own.site.line if own.site else None,
        rank.rank,
        _evidence(rank, own, other, its),
    )


def _buffers(seen: Observation, own: Numbered) -> str:
    wraps = [
        wrap
        for rank in seen.ranks
        for wrap in rank.of(Wrap)
        if wrap.model == getattr(own, "model", None) and wrap.buffers
    ]
    return (
        f"its {len(wraps[0].buffers)} buffers ({', '.join(wraps[0].buffers[:2])} …)"
        if wraps
        else "its buffers"
    )


def _order(d: Difference) -> Finding:
    place = d.mine.site
    return Finding(
        "H04",
        "error",
        f"collective number {d.number} is {named(d.mine)} on rank {d.one.rank}, but {named(d.its)} on rank {d.other.rank}: "
        "collectives "
        "are matched by their order, so these two wait for each other or mix their data",
        "call the same collectives in the same order on every rank; only what they carry may depend on the rank",
        place.file if place else None,
        place.line if place else None,
        None,
        _evidence(d.one, d.mine, d.other, d.its),
    )


def different_sizes(seen: Observation) -> Finding | None:
    """The same call with tensors of different sizes, where somebody failed or waits."""
    groups = dict.fromkeys(group for rank in seen.ranks for group in rank.collectives)
    for group in groups:
        ranks = members(seen, group)
        for one, other in ((one, other) for i, one in enumerate(ranks) for other in ranks[i + 1 :]):
            for number in range(1, min(reached(one, group), reached(other, group)) + 1):
                mine, its = at(one, group, number), at(other, group, number)
                if not (
                    isinstance(mine, Collective)
                    and isinstance(its, Collective)
                    and mine.op == its.op in SAME_SIZE
                ):
                    continue
                if (
                    mine.shape is None
                    or its.shape is None
                    or (mine.shape, mine.dtype) == (its.shape, its.dtype)
                ):
                    continue
                return _sizes(one, mine, other, its)
    return None


def mixed_sizes(seen: Observation) -> Finding | None:
    """Such a call that was over on one rank, which goes on with numbers that are none; and failed
    on another."""
    found = different_sizes(seen)
    return (
        found
        if found is not None and found.severity == "error" and not any(differences(seen))
        else None
    )


def _sizes(one: RankSeen, mine: Collective, other: RankSeen, its: Collective) -> Finding:
    failed = mine.error or its.error or mine.seconds is None or its.seconds is None
    unsure = (
        ""
        if failed
        else ". It went through this time; another backend or size would fail or give wrong numbers"
    )
    return Finding(
        "H06",
        "error" if failed else "suspect",
        f"{mine.op} gets {mine.shape} {mine.dtype} on rank {one.rank} and {its.shape} {its.dtype} on rank {other.rank}: all "
        "ranks must "
        f"give tensors of one size{unsure}",
        "pad to the largest size (all_reduce the size with MAX first), or use dist.all_gather_object, or drop the last, "
        "smaller batch",
        mine.site.file if mine.site else None,
        mine.site.line if mine.site else None,
        None,
        _evidence(one, mine, other, its),
    )


def _wire(operation: Numbered) -> tuple[object, ...]:
    shape = (
        tuple(operation.shape)
        if isinstance(operation, Collective) and operation.shape is not None
        else None
    )
    forward = isinstance(operation, Forward)  # buffers of one model: the same on all ranks
    return kind(operation), shape, getattr(operation, "model", None) if forward else None


def _evidence(
    one: RankSeen, mine: Numbered, other: RankSeen, its: Numbered | None
) -> tuple[str, ...]:
    def line(rank: RankSeen, operation: Numbered) -> str:
        code = f": {operation.site.place.code}" if operation.site else ""
        return f"rank {rank.rank}: {named(operation)}{code}"

    return (
        line(one, mine),
        line(other, its)
        if its is not None
        else f"rank {other.rank}: {other.made} optimizer steps, then its end",
    )
