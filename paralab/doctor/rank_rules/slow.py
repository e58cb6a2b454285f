"""Where observed ranks lose their time: the judgements of `doctor.waste`, on the times that the ranks wrote down.

A *window* is what a rank did from the end of one optimiser step to the end of the next. Numbers that change while the command runs
are judged when it is over, and only where enough windows were seen: the first ones, and a trial of three steps, tell nothing.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from paralab.analyse.metrics import LATE_STEPS
from paralab.analyse.recording import WARM_UP
from paralab.doctor import waste
from paralab.doctor.events import Amp, Backward, Batch, Collective, Event, Init, Loader, Pipeline, Reduced, Step, Wrap, ZeroGrad
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.place import Site
from paralab.doctor.rules import in_ranks
from paralab.units import plural, size

FEWEST = 6  # windows after the warm-up
FEWEST_PASSES = 4  # of DDP, which measures its first ten
SCHEDULES = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b", "ScheduleInterleaved1F1B": "interleaved"}


@dataclass(frozen=True)
class Window:
    begin: float
    end: float
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def windows(rank: RankSeen) -> list[Window]:
    """Of the optimiser that made most steps; the time before its first step belongs to nothing."""
    made = Counter(step.optimiser for step in rank.steps)
    main = made.most_common(1)[0][0] if made else None
    ends = [step.t + (step.seconds or 0.0) for step in rank.steps if step.optimiser == main]
    return [Window(begin, end, tuple(e for e in rank.events if begin <= e.t < end)) for begin, end in pairwise(ends)]


def measured(observation: Observation) -> list[list[Window]]:
    """Per rank, the windows that all ranks have, after the warm-up; empty where they are too few, or not over yet."""
    if not observation.over or not observation.ranks:
        return []
    per_rank = [windows(rank) for rank in observation.ranks]
    many = min(map(len, per_rank))
    return [each[WARM_UP:many] for each in per_rank] if many - WARM_UP >= FEWEST else []


def at(finding: Finding, site: Site | None) -> Finding:
    return replace(finding, file=site.file, line=site.line) if site else finding


def _reduced(event: Event) -> bool:
    """A backward pass in which gradients were reduced."""
    return isinstance(event, Backward) and _buckets(event) > 0


@in_ranks("W01")
def over_a_tenth(observation: Observation) -> Iterator[Finding]:
    """What the user's own collectives cost, and what DDP measured of its own."""
    found = measured(observation)
    if len(found) < 2:
        return
    step = statistics.median(window.seconds for window in found[0])
    calls = [_collectives(window) for window in found[0]]
    spent = statistics.median(
        sum(min(times) for times in zip(*(map(_took, _collectives(rank[number])) for rank in found), strict=False))
        for number in range(len(found[0]))
    )
    if any(calls):
        largest = max((call for window in calls for call in window), key=_took)
        how = f"{plural(round(statistics.median(map(len, calls))), 'collective')} per step, most of it at {largest.site}"
        if finding := waste.over_a_tenth(spent, spent, step, how):
            yield at(finding, largest.site)
    if reduced := reductions(observation):
        how = f"DDP sends {plural(len(reduced.sizes), 'bucket')} of together {size(sum(reduced.sizes))} in every step"
        finding = waste.over_a_tenth(reduced.transfer, reduced.exposed, step, how)
        yield from [at(finding, reduced.site)] if finding else []


@in_ranks("W02")
def one_bucket(observation: Observation) -> Iterator[Finding]:
    found, reduced = measured(observation), reductions(observation)
    if found and reduced:
        step = statistics.median(window.seconds for window in found[0])
        finding = waste.one_bucket(reduced.sizes, reduced.compute, reduced.transfer, reduced.exposed, step)
        yield from [at(finding, reduced.site)] if finding else []


@dataclass(frozen=True)
class Reduction:
    """A usual backward pass of the first DDP model, in seconds. `site`: where the model was wrapped."""

    sizes: list[int]
    compute: float
    transfer: float
    exposed: float
    site: Site | None


def reductions(observation: Observation) -> Reduction | None:
    """The rank that waits least in a pass came last to it, and shows what sending takes."""
    per_rank = [{e.iteration: e for e in rank.of(Reduced) if e.model == 0 and e.iteration > WARM_UP} for rank in observation.ranks]
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
    """That the user's code waited for; sends and receives wait for the other side's computing, and are left out."""
    return [e for e in window.events if isinstance(e, Collective) and e.seq and e.seconds and not e.asynchronous]


def _took(event: Event) -> float:
    return event.seconds or 0.0


@in_ranks("W03")
def straggler(observation: Observation) -> Iterator[Finding]:
    """Who comes last to where gradients are reduced. Clocks of several machines are not compared."""
    found = measured(observation)
    if len(found) < 2 or len({rank.start.host for rank in observation.ranks}) > 1:
        return
    arrivals = [[_arrival(window) for window in rank] for rank in found]
    rounds = [round_ for round_ in zip(*arrivals, strict=True) if None not in round_]
    if len(rounds) < FEWEST:
        return
    last = Counter(max(range(len(round_)), key=lambda rank: round_[rank] or 0.0) for round_ in rounds)
    place, times = last.most_common(1)[0]
    waits = [(round_[place] or 0.0) - min(t for number, t in enumerate(round_) if number != place and t) for round_ in rounds]
    step = statistics.median(window.seconds for window in found[0])
    if times >= LATE_STEPS * len(rounds):
        finding = waste.straggler(observation.ranks[place].rank, statistics.median(waits), step, times, len(rounds))
        yield from [finding] if finding else []


def _arrival(window: Window) -> float | None:
    """When a rank came to its first synchronisation: the backward pass of DDP, or a collective of its own."""
    return next((e.t for e in window.events if _reduced(e) or (isinstance(e, Collective) and e.seq)), None)


@in_ranks("T06")
def waiting_for_data(observation: Observation) -> Iterator[Finding]:
    found = measured(observation)
    if not found:
        return
    waited = [statistics.median(sum(_waits(window)) for window in rank) for rank in found]
    worst = max(range(len(waited)), key=lambda number: waited[number])
    whole = statistics.median(window.seconds for window in found[worst])
    alone = len(waited) > 1 and min(waited) < waited[worst] / 2
    finding = waste.data_wait(waited[worst], max(0.0, whole - waited[worst]), observation.ranks[worst].rank if alone else None)
    loader = observation.ranks[worst].last(Loader)
    yield from [at(finding, loader.site if loader else None)] if finding else []


def _waits(window: Window) -> Sequence[float]:
    return [event.wait for event in window.events if isinstance(event, Batch)]


@in_ranks("T06")
def crowd_of_workers(observation: Observation) -> Iterator[Finding]:
    """Loader workers of all ranks of a machine against its cores."""
    for ranks in _by_host(observation):
        loaders = [max(rank.of(Loader), key=lambda loader: loader.workers, default=None) for rank in ranks]
        workers, cores = sum(loader.workers for loader in loaders if loader), ranks[0].start.cores
        first = next((loader for loader in loaders if loader and loader.workers), None)
        if observation.over and first and workers > cores:
            why = (
                f"num_workers={first.workers} on each of {plural(len(ranks), 'rank')} are {workers} processes beside the ranks, on "
                f"{plural(cores, 'core')}: they take cores from the training and from one another. Certain if steps wait for data."
            )
            fix = f"num_workers={max(0, cores // len(ranks) - 1)}: cores / ranks, less one for the rank itself."
            yield at(Finding("T06", "suspect", why, fix, evidence=(f"{workers} workers, {cores} cores",)), first.site)


def _by_host(observation: Observation) -> list[list[RankSeen]]:
    hosts = dict.fromkeys(rank.start.host for rank in observation.ranks)
    return [[rank for rank in observation.ranks if rank.start.host == host] for host in hosts]


@in_ranks("L09")
def crowd_of_threads(observation: Observation) -> Iterator[Finding]:
    """Threads are known from the moment when the process became a rank. One of a launcher is one from its import on, and may have
    set its threads later."""
    for ranks in _by_host(observation):
        threads, cores = max(rank.start.threads for rank in ranks), ranks[0].start.cores
        finding = waste.crowded(threads, len(ranks), cores, "rank")
        if not observation.over or len(ranks) < 2 or threads < 2 or not finding:
            continue
        late = all((init := rank.last(Init)) is not None and rank.start.t > init.t - 0.1 for rank in ranks)
        sure: Severity = "warning" if late else "suspect"
        doubt = "" if late else " Certain if the script does not call torch.set_num_threads itself."
        yield replace(finding, severity=sure, why=finding.why + doubt)


@in_ranks("S04")
def needless_search(observation: Observation) -> Iterator[Finding]:
    """DDP itself counts what each rank left unused in its first passes."""
    if not observation.over or not observation.ranks:
        return
    for wrap in observation.ranks[0].of(Wrap):
        looked = [[e.unused_bytes for e in rank.of(Reduced) if e.model == wrap.model] for rank in observation.ranks]
        if wrap.options.get("find_unused_parameters") and all(looked) and not any(used for rank in looked for used in rank):
            yield at(waste.needless_search(sum(wrap.trainable), min(map(len, looked))), wrap.site)


@in_ranks("G02")
def synced_every_pass(observation: Observation) -> Iterator[Finding]:
    """Passes from the same line, with nothing cleared between them, that all reduce."""
    if not observation.over or not observation.ranks or observation.world < 2:
        return
    rank = observation.ranks[0]
    runs, run = [], list[Backward]()
    for event in rank.events:
        if isinstance(event, Step | ZeroGrad):
            runs.append(run) if run and isinstance(event, Step) else None
            run = []
        elif isinstance(event, Backward) and event.site and (not run or event.site == run[-1].site):
            run.append(event)
    several = [run for run in runs if len(run) > 1]
    if not several or len(several) * 2 < len(runs) or not all(_reduced(event) for run in several for event in run):
        return
    last = several[-1]
    buckets = _buckets(last[-1])
    finding = waste.synced_every_pass(sum(map(_buckets, last)), buckets, len(last), None, 0.0)
    yield from [at(finding, last[-1].site)] if finding else []


def _buckets(event: Backward) -> int:
    return event.seq[1] - event.seq[0] + 1 if event.seq else 0


@in_ranks("P05")
def idle_stages(observation: Observation) -> Iterator[Finding]:
    if not observation.over:
        return
    steps = [step for rank in observation.ranks for step in rank.of(Pipeline)]
    sizes = [step.size for step in steps if step.size]
    for step in steps[:1]:
        schedule = SCHEDULES.get(step.schedule, "gpipe")
        finding = waste.idle_stages(None, step.stages, step.microbatches, schedule, max(sizes, default=None))
        yield from [at(finding, step.site)] if finding and step.stages > 1 else []


@in_ranks("W06")
def not_finite(observation: Observation) -> Iterator[Finding]:
    """Without a GradScaler: with one it is A08."""
    for rank in observation.ranks:
        passes = [event for event in rank.of(Backward) if event.loss is not None]
        losses = [event.loss if isinstance(event.loss, float | int) else None for event in passes]
        finding = waste.lost_loss(losses, []) if observation.over and len(losses) > 2 and not _scales(rank) else None
        if finding:
            first = passes[losses.index(None)]
            why = finding.why.replace("step", "backward pass", 1)
            yield at(replace(finding, why=why, rank=None, evidence=(f"step {first.step}: loss {first.loss}",)), first.site)
            return


def _scales(rank: RankSeen) -> bool:
    return any(event.enabled for event in rank.of(Amp))
