"""A recording as the doctor might have read it at any moment. It reads one rank after another, so
one rank may be far ahead."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from msgspec import structs

from paralab.doctor.observation import Numbered, Observation, WatchedRank
from paralab.doctor.rank_collectives import group_of

TRIES = 10  # attempts to find a possible moment


def moments(whole: Observation, count: int, seed: str) -> Iterator[Observation]:
    """Return at most `count` moments. In a possible moment, no rank has left a collective that
    another rank has not reached."""
    chosen = random.Random(seed)
    times = [
        sorted({t for event in rank.events for t in (event.t, _end(event))}) for rank in whole.ranks
    ]
    for _ in range(count * TRIES):
        ranks = [
            _at(rank, chosen.choice(mine)) for rank, mine in zip(whole.ranks, times, strict=True)
        ]
        if all(rank.events for rank in ranks) and _could_be(ranks):
            yield replace(whole, ranks=ranks, over=False, exit_code=None)
            count -= 1
        if not count:
            return


def _end(event) -> float:
    return event.t + (event.seconds or 0.0)


def _at(rank: WatchedRank, now: float) -> WatchedRank:
    over = tuple(event for event in rank.events if _end(event) <= now)
    doing = tuple(
        structs.replace(event, seconds=None)
        for event in rank.events
        if event.t <= now < _end(event)
    )
    return replace(
        rank, events=over, doing=doing, recent=(), lives=True, settled=False, answer=None
    )


def _could_be(ranks: list[WatchedRank]) -> bool:
    left = [_numbers(rank.events, 1) for rank in ranks]
    come_to = [mine | _numbers(rank.doing, 0) for mine, rank in zip(left, ranks, strict=True)]
    return all(
        other[group] >= number
        for mine in left
        for group, number in mine.items()
        for other in come_to
    )


def _numbers(events, place: int) -> Counter[str]:
    """Return group -> the largest first (0) or last (1) number of a collective."""
    found: Counter[str] = Counter()
    for event in events:
        if isinstance(event, Numbered) and event.seq:
            found[group_of(event)] = max(found[group_of(event)], event.seq[place])
    return found
