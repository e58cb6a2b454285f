"""A run folder, read once: its manifest, its events per rank, and the steps that every rank
finished."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from paralab.errors import UsageError
from paralab.record.reader import Event, read_events, read_status

WARM_UP = (
    3  # steps left out of the timings where there are enough: allocation, DDP's rebuilt buckets
)


@dataclass(frozen=True)
class Recording:
    folder: Path
    manifest: dict[str, Any]
    events: dict[int, list[Event]]
    damaged: dict[int, int] = field(
        default_factory=dict
    )  # rank -> lines that could not be used, where there are any

    @classmethod
    def read(cls, folder: Path) -> Recording:
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{folder} is no run folder: {error}.",
                fix="a folder that paralab has made, e.g. runs/…",
            ) from error
        if not isinstance(manifest, dict) or "plan" not in manifest:
            raise UsageError(
                f"{folder} holds several runs, and is no run itself.",
                fix="paralab show with it alone, or a run in it",
            )
        damaged: Counter[int] = Counter()
        events = read_events(folder, damaged=damaged)
        return cls(
            folder, manifest, events, {rank: lines for rank, lines in damaged.items() if lines}
        )

    @property
    def plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = self.manifest["plan"]
        return plan

    @property
    def world_size(self) -> int:
        return len(self.plan["ranks"])

    @cached_property
    def steps(self) -> list[list[Event]]:
        """The steps that every rank finished: for each, one `step` event per rank."""
        per_rank = [
            {event["step"]: event for event in self.named("step", rank)}
            for rank in range(self.world_size)
        ]
        finished = sorted(set.intersection(*(set(steps) for steps in per_rank)))
        return [[steps[number] for steps in per_rank] for number in finished]

    @cached_property
    def _by_number(self) -> dict[int, list[Event]]:
        return {step[0]["step"]: step for step in self.steps}

    def step(self, number: int) -> list[Event]:
        """A step by its number; a resumed training does not begin with 0."""
        return self._by_number[number]

    @property
    def begun_at(self) -> int:
        """The step with which this run began: 0, or where the checkpoint was made that it was
        resumed from."""
        return min(
            (event["step"] for event in self.named("step") + self.named("resume")), default=0
        )

    @property
    def reached(self) -> int:
        """How many steps of the training are done, with those before this run."""
        return max((step[0]["step"] + 1 for step in self.steps), default=self.begun_at)

    @property
    def warm_up(self) -> int:
        return WARM_UP if len(self.steps) >= 3 * WARM_UP else max(0, min(1, len(self.steps) - 1))

    def seconds_of(self, step: list[Event]) -> float:
        """A step lasts from its first rank's start to its slowest rank's end."""
        return float(max(event["end"] for event in step) - min(event["start"] for event in step))

    @property
    def step_seconds(self) -> list[float]:
        """The lengths of the timed steps."""
        return [self.seconds_of(step) for step in self.timed]

    @property
    def timed(self) -> list[list[Event]]:
        """The steps that are measured: those after the warm-up."""
        return self.steps[self.warm_up :]

    @cached_property
    def _spans(self) -> dict[tuple[int, int], list[Event]]:
        found: dict[tuple[int, int], list[Event]] = {}
        for rank, events in self.events.items():
            for event in events:
                if "start" in event and "step" in event and event["event"] not in ("step", "data"):
                    found.setdefault((rank, event["step"]), []).append(event)
        return found

    def spans(self, rank: int, step: int) -> list[Event]:
        """What a rank did in a step; empty for a step of which no details were kept."""
        return self._spans.get((rank, step), [])

    def named(self, event: str, rank: int | None = None) -> list[Event]:
        ranks = self.events.values() if rank is None else [self.events.get(rank, [])]
        return [found for events in ranks for found in events if found["event"] == event]

    @property
    def status(self) -> str:
        return read_status(self.events, self.world_size)
