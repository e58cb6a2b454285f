"""Measure the step times of watched ranks, for the checks that report waste.

A *window* is what a rank does between the ends of two optimizer steps. Step times vary, so
checks judge them when the command has ended, and only with enough windows after the warm-up.
"""

import statistics
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

from paralab.analyse.recording import WARM_UP
from paralab.doctor.events import Event, Reduced, Wrap
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.place import Site
from paralab.doctor.registry import Finding, Findings

FEWEST = 6  # windows after the warm-up
TOY_SECONDS = 0.02  # a shorter step on the CPU is a toy example, where waste does not matter
FEWEST_PASSES = 4  # passes with times from DDP


@dataclass(frozen=True)
class Window:
    seconds: float
    events: tuple[Event, ...]


def windows(rank: WatchedRank) -> list[Window]:
    """Return the windows of the optimizer with the most steps, starting with its first step."""
    made = Counter(step.optimizer for step in rank.steps)
    main = made.most_common(1)[0][0] if made else None
    ends = [step.t + (step.seconds or 0.0) for step in rank.steps if step.optimizer == main]
    times = [event.t for event in rank.events]
    return [
        Window(end - begin, rank.events[bisect_left(times, begin) : bisect_left(times, end)])
        for begin, end in pairwise(ends)
    ]


def measured_windows(seen: Observation) -> list[list[Window]]:
    """Return the windows after the warm-up that all ranks have, or nothing if there are too few."""
    if not seen.over or not seen.ranks:
        return []
    per_rank = [windows(rank) for rank in seen.ranks]
    shortest = min(map(len, per_rank))
    if shortest - WARM_UP < FEWEST:
        return []
    compared = [each[WARM_UP:shortest] for each in per_rank]
    toy = not seen.ranks[0].start.gpus and step_seconds(compared) < TOY_SECONDS
    return [] if toy else compared


def step_seconds(per_rank: list[list[Window]]) -> float:
    return statistics.median(window.seconds for window in per_rank[0])


@dataclass(frozen=True)
class Reduction:
    """A typical backward pass of the first DDP model, in seconds, and where it was wrapped."""

    sizes: list[int]
    compute: float
    transfer: float
    exposed: float
    site: Site | None


def reductions(seen: Observation) -> Reduction | None:
    """Return DDP's times. The rank that waits least arrived last, so its wait is only the
    transfer time."""
    per_rank = [
        {e.iteration: e for e in rank.of(Reduced) if e.model == 0 and e.iteration > WARM_UP}
        for rank in seen.ranks
    ]
    common = set.intersection(*map(set, per_rank)) if per_rank else set()
    if len(common) < FEWEST_PASSES or len(per_rank) < 2:
        return None
    passes = [[rank[number] for rank in per_rank] for number in sorted(common)]
    wrap = next((wrap for wrap in seen.ranks[0].of(Wrap) if wrap.model == 0), None)
    return Reduction(
        passes[-1][0].buckets,
        statistics.median(statistics.mean(e.compute for e in ranks) for ranks in passes),
        statistics.median(min(e.transfer for e in ranks) for ranks in passes),
        statistics.median(min(max(0.0, e.transfer - e.hidden) for e in ranks) for ranks in passes),
        wrap.site if wrap else None,
    )


def report_at(site: Site | None, *findings: Finding | None) -> Findings:
    """Yield the findings, with the line of the script if `site` is known."""
    for finding in findings:
        if finding is not None:
            yield replace(finding, file=site.file, line=site.line) if site else finding
