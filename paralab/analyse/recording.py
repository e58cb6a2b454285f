"""Read a run folder: its manifest, the events per rank, and the steps that all ranks finished."""

import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self, TypeVar

from paralab.analyse.manifest import RunManifest, manifest_of
from paralab.errors import UsageError
from paralab.plan.plan import Plan
from paralab.record.events import Event, Resume, Span, Step
from paralab.record.reader import read_events, read_status
from paralab.record.types import read_manifest

# Do not time the first steps, because they allocate memory and rebuild DDP's buckets.
WARM_UP = 3

E = TypeVar("E", bound=Event)


def warm_up_steps(steps: int) -> int:
    """Return how many of these steps are warm-up: 30 -> 3, 8 -> 1, 1 -> 0."""
    return WARM_UP if steps >= 3 * WARM_UP else max(0, min(1, steps - 1))


def bounds(steps: list[list[Step]]) -> tuple[float, float]:
    """Return the first step's start and the last step's end, over all ranks."""
    return min(event.start for event in steps[0]), max(event.end for event in steps[-1])


def seconds_between(steps: list[list[Step]]) -> float:
    begin, end = bounds(steps) if steps else (0.0, 0.0)
    return end - begin


def count_samples(step: list[Step]) -> int:
    """Return the number of samples in a step, over all ranks."""
    return sum(event.samples for event in step)


def mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def quantiles(values: list[float], n: int) -> list[float]:
    """Return the values that divide a list into n parts, interpolated: 2 3 4 for 1 2 3 4 5."""
    # Before Python 3.13, `quantiles` needs at least two values.
    return statistics.quantiles(values if values[1:] else values * 2, n=n, method="inclusive")


@dataclass(frozen=True)
class Recording:
    folder: Path
    manifest: RunManifest
    events: dict[int, list[Event]]
    damaged: dict[int, int] = field(default_factory=dict)  # rank -> number of unreadable lines

    @classmethod
    def read(cls, folder: Path) -> Self:
        if "plan" not in read_manifest(folder):
            problem = f"{folder} contains multiple runs; it is not a run itself."
            raise UsageError(problem, fix="paralab show FOLDER, or pass one of the runs in it")
        damaged: Counter[int] = Counter()
        events = read_events(folder, damaged=damaged)
        return cls(folder, manifest_of(folder, RunManifest), events, dict(+damaged))

    @property
    def plan(self) -> Plan:
        return self.manifest.plan

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @cached_property
    def steps(self) -> list[list[Step]]:
        """The steps that all ranks finished, with one `Step` per rank."""
        per_rank = [
            {event.step: event for event in self.of(Step, rank)} for rank in range(self.world_size)
        ]
        finished = sorted(set.intersection(*(set(steps) for steps in per_rank)))
        return [[steps[number] for steps in per_rank] for number in finished]

    @property
    def losses(self) -> list[float]:
        """The batch loss of each finished step, which is the sum of the ranks' losses."""
        return [sum(event.loss for event in step) for step in self.steps]

    def step(self, number: int) -> list[Step]:
        """Return a step by its number. A resumed run does not start at 0."""
        return self.steps[bisect_left(self.steps, number, key=lambda step: step[0].step)]

    @property
    def begun_at(self) -> int:
        """The first step of this run: 0, or the step of the checkpoint it resumed from."""
        steps = [event.step for event in self.of(Step)] + [e.step for e in self.of(Resume)]
        return min(steps, default=0)

    @property
    def reached(self) -> int:
        """The number of finished steps, including steps before this run."""
        return max((step[0].step + 1 for step in self.steps), default=self.begun_at)

    @cached_property
    def warm_up(self) -> int:
        """The number of warm-up steps, which leave at least one full step to time. If an epoch has
        64 + 1 samples, the second of two steps says nothing about a batch of 64."""
        largest = max(map(count_samples, self.steps), default=0)
        full = (n for n, step in enumerate(self.steps) if count_samples(step) == largest)
        return min(warm_up_steps(len(self.steps)), max(full, default=0))

    @property
    def step_seconds(self) -> list[float]:
        """The duration of each full step."""
        return [seconds_between([step]) for step in self.full]

    @property
    def timed(self) -> list[list[Step]]:
        """The steps after the warm-up."""
        return self.steps[self.warm_up :]

    @cached_property
    def full(self) -> list[list[Step]]:
        """The timed steps with the most samples. The last batch of an epoch may be smaller, and a
        median over both sizes would describe neither."""
        largest = max(map(count_samples, self.timed), default=0)
        return [step for step in self.timed if count_samples(step) == largest]

    @property
    def detailed(self) -> list[int]:
        """The numbers of the full steps with recorded details."""
        return [step[0].step for step in self.full if self.spans(0, step[0].step)]

    @cached_property
    def _spans(self) -> dict[tuple[int, int], list[Span]]:
        spans: dict[tuple[int, int], list[Span]] = defaultdict(list)
        for rank in self.events:
            for span in self.of(Span, rank):
                if span.event not in ("step", "data"):
                    spans[rank, span.step].append(span)
        return spans

    def spans(self, rank: int, step: int) -> list[Span]:
        """Return a rank's spans in a step. Long runs record the details of only some steps."""
        return self._spans.get((rank, step), [])

    def spans_of_ranks(self, step: int) -> list[list[Span]]:
        return [self.spans(rank, step) for rank in range(self.world_size)]

    def of(self, kind: type[E], rank: int | None = None) -> list[E]:
        """Return all events of one type, for one rank or for all."""
        ranks = self.events.values() if rank is None else [self.events.get(rank, [])]
        return [event for events in ranks for event in events if isinstance(event, kind)]

    def by_rank(self, kind: type[E]) -> list[tuple[int, E]]:
        return [(rank, event) for rank in self.events for event in self.of(kind, rank)]

    def named(self, name: str, rank: int) -> list[Span]:
        return [span for span in self.of(Span, rank) if span.event == name]

    @property
    def status(self) -> str:
        return read_status(self.events, self.world_size)
