"""Where observed ranks lose their time: the judgements of `doctor.waste`, on the times that the
ranks wrote down. Waste that has an entry of its own in the catalogue (data, threads, passes that
all reduce) is found by the rules of that entry.

A *window* is what a rank did from the end of one optimizer step to the end of the next. Numbers
that change while the command runs are judged when it is over, and only where enough windows were
seen: the first ones, and a trial of three steps, tell nothing.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from paralab.analyse.metrics import LATE_STEPS
from paralab.analyse.recording import WARM_UP
from paralab.doctor import waste
from paralab.doctor.events import Amp, Backward, Collective, Event, Reduced, Wrap
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.place import Site
from paralab.doctor.registry import check
from paralab.units import plural, seconds, size

FEWEST = 6  # windows after the warm-up
TOY_SECONDS = 0.02  # a step on the CPU: what it wastes, nobody waits for
FEWEST_PASSES = 4  # of DDP, which measures its first ten


@dataclass(frozen=True)
class Window:
    begin: float
    end: float
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def windows(rank: RankSeen) -> list[Window]:
    """Of the optimizer that made most steps; the time before its first step belongs to nothing."""
    made = Counter(step.optimizer for step in rank.steps)
    main = made.most_common(1)[0][0] if made else None
    ends = [step.t + (step.seconds or 0.0) for step in rank.steps if step.optimizer == main]
    times = [
        event.t for event in rank.events
    ]  # in order: a window is found by halving, not by going through all of them
    return [
        Window(begin, end, rank.events[bisect_left(times, begin) : bisect_left(times, end)])
        for begin, end in pairwise(ends)
    ]


def measured(observation: Observation) -> list[list[Window]]:
    """Per rank, the windows that all ranks have, after the warm-up; empty where they are too few,
    or not over yet."""
    if not observation.over or not observation.ranks:
        return []
    per_rank = [windows(rank) for rank in observation.ranks]
    many = min(map(len, per_rank))
    kept = [each[WARM_UP:many] for each in per_rank] if many - WARM_UP >= FEWEST else []
    toy = (
        kept
        and not observation.ranks[0].start.gpus
        and statistics.median(w.seconds for w in kept[0]) < TOY_SECONDS
    )
    return [] if toy else kept


def at(finding: Finding, site: Site | None) -> Finding:
    return replace(finding, file=site.file, line=site.line) if site else finding


def _reduced(event: Event) -> bool:
    """A backward pass in which gradients were reduced."""
    return isinstance(event, Backward) and event.seq is not None and event.seq[1] >= event.seq[0]


@check("W01", source="ranks")
def over_a_tenth(observation: Observation) -> Iterator[Finding]:
    """What the user's own collectives cost, and what DDP measured of its own."""
    found = measured(observation)
    if len(found) < 2:
        return
    step = statistics.median(window.seconds for window in found[0])
    calls = [_collectives(window) for window in found[0]]
    spent = statistics.median(
        sum(
            min(times)
            for times in zip(
                *(map(_took, _collectives(rank[number])) for rank in found), strict=False
            )
        )
        for number in range(len(found[0]))
    )
    if any(calls):
        largest = max((call for window in calls for call in window), key=_took)
        how = f"{plural(round(statistics.median(map(len, calls))), 'collective')} per step, most of it at {largest.site}"
        if finding := waste.over_a_tenth(spent, spent, step, how):
            yield at(finding, largest.site)
    if reduced := reductions(observation):
        sent = f"DDP sends {plural(len(reduced.sizes), 'bucket')} of together {size(sum(reduced.sizes))} in every step"
        how = f"{sent}, {seconds(reduced.transfer)} from the first one's departure to the last one's arrival"
        # Between two buckets it may only compute: what is exposed is surely communication.
        finding = waste.over_a_tenth(reduced.exposed, reduced.exposed, step, how)
        yield from [at(finding, reduced.site)] if finding else []


@check("W02", source="ranks")
def one_bucket(observation: Observation) -> Iterator[Finding]:
    found, reduced = measured(observation), reductions(observation)
    if found and reduced:
        step = statistics.median(window.seconds for window in found[0])
        finding = waste.one_bucket(
            reduced.sizes, reduced.compute, reduced.transfer, reduced.exposed, step
        )
        yield from [at(finding, reduced.site)] if finding else []


@dataclass(frozen=True)
class Reduction:
    """A usual backward pass of the first DDP model, in seconds. `site`: where the model was
    wrapped."""

    sizes: list[int]
    compute: float
    transfer: float
    exposed: float
    site: Site | None


def reductions(observation: Observation) -> Reduction | None:
    """The rank that waits least in a pass came last to it, and shows what sending takes."""
    per_rank = [
        {e.iteration: e for e in rank.of(Reduced) if e.model == 0 and e.iteration > WARM_UP}
        for rank in observation.ranks
    ]
    common = set.intersection(*map(set, per_rank)) if per_rank else set()
    if len(common) < FEWEST_PASSES or len(per_rank) < 2:
        return None
    passes = [[rank[number] for rank in per_rank] for number in sorted(common)]
    wrap = next((wrap for wrap in observation.ranks[0].of(Wrap) if wrap.model == 0), None)
    return Reduction(
        passes[-1][0].buckets,
        statistics.median(statistics.mean(e.compute for e in ranks) for ranks in passes),
        statistics.median(min(e.transfer for e in ranks) for ranks in passes),
        statistics.median(min(max(0.0, e.transfer - e.hidden) for e in ranks) for ranks in passes),
        wrap.site if wrap else None,
    )


def _collectives(window: Window) -> list[Collective]:
    """That the user's code waited for; sends and receives wait for the other side's computing, and
    are left out."""
    return [
        e
        for e in window.events
        if isinstance(e, Collective) and e.seq and e.seconds and not e.asynchronous
    ]


def _took(event: Event) -> float:
    return event.seconds or 0.0


@check("W03", source="ranks")
def straggler(observation: Observation) -> Iterator[Finding]:
    """Who comes last to where gradients are reduced. Clocks of several machines are not
    compared."""
    found = measured(observation)
    if len(found) < 2 or len({rank.start.host for rank in observation.ranks}) > 1:
        return
    arrivals = [[_arrival(window) for window in rank] for rank in found]
    rounds = [round_ for round_ in zip(*arrivals, strict=True) if None not in round_]
    if len(rounds) < FEWEST:
        return
    last = Counter(
        max(range(len(round_)), key=lambda rank: round_[rank] or 0.0) for round_ in rounds
    )
    place, times = last.most_common(1)[0]
    waits = [
        (round_[place] or 0.0) - min(t for number, t in enumerate(round_) if number != place and t)
        for round_ in rounds
    ]
    step = statistics.median(window.seconds for window in found[0])
    if times >= LATE_STEPS * len(rounds):
        finding = waste.straggler(
            observation.ranks[place].rank, statistics.median(waits), step, times, len(rounds)
        )
        yield from [finding] if finding else []


def _arrival(window: Window) -> float | None:
    """When a rank came to its first synchronization: the backward pass of DDP, or a collective of
    its own."""
    return next(
        (e.t for e in window.events if _reduced(e) or (isinstance(e, Collective) and e.seq)), None
    )


@check("W06", source="ranks")
def not_finite(observation: Observation) -> Iterator[Finding]:
    """Without a GradScaler: with one it is A08."""
    for rank in observation.ranks:
        passes = [event for event in rank.of(Backward) if event.loss is not None]
        losses = [event.loss if isinstance(event.loss, float | int) else None for event in passes]
        finding = (
            waste.lost_loss(losses, [])
            if observation.over and len(losses) > 2 and not _scales(rank)
            else None
        )
        if finding:
            first = passes[losses.index(None)]
            why = finding.why.replace("step", "backward pass", 1)
            yield at(
                replace(
                    finding, why=why, rank=None, evidence=(f"step {first.step}: loss {first.loss}",)
                ),
                first.site,
            )
            return


def _scales(rank: RankSeen) -> bool:
    return any(event.enabled for event in rank.of(Amp))
