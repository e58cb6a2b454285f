"""Collectives that went through and still mixed the ranks' data, and groups that nobody has taken
down."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from paralab.analyse.collective_matching import changed_places
from paralab.doctor.events import Collective, Destroy, Init
from paralab.doctor.finding import Finding
from paralab.doctor.lines import opposite, written
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.registry import check

Calls = dict[int, Collective]


@check("H05", source="ranks")
def swapped(seen: Observation) -> Iterator[Finding]:
    """Two ranks make the same calls in another order, and all of them fit: every number is wrong,
    and nothing is said.

    rank 0    all_reduce(loss)  all_reduce(acc)
    rank 1    all_reduce(acc)   all_reduce(loss)
    """
    for group in dict.fromkeys(group for rank in seen.ranks for group in rank.collectives):
        ranks = [(rank, _calls(rank, group)) for rank in seen.ranks]
        for (one, mine), (other, its) in (
            (a, b) for i, a in enumerate(ranks) for b in ranks[i + 1 :]
        ):
            if window := _first_swap(mine, its):
                yield _finding(
                    one,
                    other,
                    [mine[number] for number in window],
                    [its[number] for number in window],
                    window,
                )
                return


def _calls(rank: RankSeen, group: str) -> Calls:
    """Collectives of the user's own code that are over, by number."""
    found = rank.collectives.get(group, {})
    return {
        number: c
        for number, c in found.items()
        if isinstance(c, Collective) and c.site and c.seconds is not None and not c.error
    }


def text(call: Collective) -> tuple[str, ...]:
    """What is called, in words: the two sides of an `if` hold the same call twice, on different
    lines."""
    assert call.site
    return tuple(written(place) for place in call.site.stack)


def _first_swap(mine: Calls, its: Calls) -> list[int] | None:
    numbers = sorted(set(mine) & set(its))
    # what comes after the first difference is shifted against each other
    differ = list(itertools.dropwhile(lambda n: text(mine[n]) == text(its[n]), numbers))
    together = list(
        itertools.takewhile(lambda n: mine[n].step == its[n].step == mine[differ[0]].step, differ)
    )
    window = together[
        : changed_places([text(mine[n]) for n in together], [text(its[n]) for n in together])
    ]
    return window if window and not _are_alternatives([mine[n] for n in window]) else None


def _are_alternatives(calls: list[Collective]) -> bool:
    """Calls of one rank on two sides of one `if`: it makes one or the other, as its data are, and
    both may be meant to meet."""
    sites = [call.site for call in calls if call.site]
    return any(opposite(one, other) for i, one in enumerate(sites) for other in sites[i + 1 :])


def _finding(
    one: RankSeen, other: RankSeen, mine: list[Collective], its: list[Collective], window: list[int]
) -> Finding:
    first, partner = mine[0], its[0]
    assert first.site
    assert partner.site
    return Finding(
        "H05",
        "error",
        f"collective number {window[0]} is `{written(first.site.place)}` on rank {one.rank} and `{written(partner.site.place)}` at "
        f"{partner.site} on rank {other.rank}: they fit in kind and size, so both ranks silently got a mixture of the two values",
        "make these calls in the same order on every rank, or pack the values into one tensor and reduce that",
        first.site.file,
        first.site.line,
        None,
        tuple(
            f"number {n}: rank {one.rank} {text(a)[0]} at {a.site} | rank {other.rank} {text(b)[0]} at {b.site}"
            for n, a, b in zip(window[:4], mine, its, strict=False)
        ),
    )


@check("H17", source="ranks")
def group_left_standing(seen: Observation) -> Iterator[Finding]:
    """A program that ended in order without destroy_process_group."""
    if not seen.over or seen.ended_by_us or seen.exit_code != 0:
        return
    made = [
        (rank, init)
        for rank in seen.ranks
        if (init := rank.last(Init)) is not None and not init.error and not rank.is_blind
    ]
    without = [
        (rank, init)
        for rank, init in made
        if rank.last(Destroy) is None and rank.came_to_its_end and not rank.raised
    ]
    if not without:
        return
    some = len(without) < len(made)
    rank, init = without[0]
    who = f"rank {rank.rank}" if some else "no rank"
    yield Finding(
        "H17",
        "warning",
        f"{who} {'never called' if some else 'called'} destroy_process_group() after this: what is still under way at the end "
        "of the "
        "program is cut off, and NCCL may hang or warn there",
        "call dist.destroy_process_group() on all ranks at the end, in a finally block",
        init.site.file if init.site else None,
        init.site.line if init.site else None,
        rank.rank if some else None,
        tuple(
            f"rank {r.rank}: destroy_process_group {'called' if r.last(Destroy) else 'not called'}"
            for r, _ in made
        ),
    )
