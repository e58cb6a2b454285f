"""Follows a run through its event files while it trains: what every rank has done so far, as plain
numbers for whoever draws them.

Shares and times are those of the last `RECENT_STEPS` steps. What is not known (yet) is None.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paralab.analyse.metrics import COLLECTIVES
from paralab.analyse.time_intervals import length
from paralab.plan.plan import Plan, RankPlan
from paralab.record.folder import RunFolder
from paralab.record.reader import Event, Tail, is_complete

RECENT_STEPS = 20
WORK = ("forward", "backward")
REPLICA_WORK = (
    "replica_forward",
    "replica_backward",
)  # inside `forward` and `backward`, which then wait for all replicas


class Share(NamedTuple):
    """A load between 0 and 1 (more where a process takes more cores than its own), and what it was
    measured with."""

    value: float
    measure: str


class Held(NamedTuple):
    """Memory in use, how much there is, and what was counted."""

    bytes: int
    capacity_bytes: int | None
    measure: str


@dataclass(frozen=True)
class Step:
    """A finished step of one rank, and the details that were kept of it: not of every step in a
    long run."""

    event: Event
    details: list[Event]

    @property
    def seconds(self) -> float:
        return float(self.event["end"] - self.event["start"])

    def covered_by(self, names: Iterable[str], device: str | None = None) -> float:
        chosen = (
            e
            for e in self.details
            if e["event"] in names and (device is None or e.get("device") == device)
        )
        return length((event["start"], event["end"]) for event in chosen)


@dataclass
class RankProgress:
    """One rank so far."""

    plan: RankPlan
    threads_per_device: int
    machine: dict[str, Any]
    started: Event | None = None
    losses: list[float] = field(default_factory=list)  # its parts of them
    samples: int = 0
    load: Event | None = None
    _memory: dict[str, Event] = field(default_factory=dict)
    _recent: deque[Step] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _details: list[Event] = field(default_factory=list)  # of the step that is not yet finished

    @property
    def devices(self) -> list[str]:
        return list(dict.fromkeys(device.name for device in self.plan.devices))

    def take(self, event: Event) -> None:
        if event["event"] == "start":
            self.started = event
        elif event["event"] == "load":
            self.load = event
        elif event["event"] == "memory":
            self._memory[event["device"]] = event
        elif event["event"] == "step":
            self._recent.append(Step(event, self._details))
            self._details = []
            self.losses.append(event["loss"])
            self.samples += event["samples"]
        elif "start" in event and "end" in event:
            self._details.append(event)

    @property
    def step_seconds(self) -> float | None:
        return statistics.median(step.seconds for step in self._recent) if self._recent else None

    @property
    def data_seconds(self) -> float | None:
        """Loading per step: the rank waits for it."""
        return (
            statistics.median(step.covered_by(("data",)) for step in self._recent)
            if self._recent
            else None
        )

    @property
    def seconds_per_step(self) -> float | None:
        """From step to step, with everything between them."""
        if len(self._recent) < 2:
            return None
        first, last = self._recent[0].event["end"], self._recent[-1].event["end"]
        return float(last - first) / (len(self._recent) - 1)

    @property
    def communication_share(self) -> float | None:
        """The part of a step in which a collective was under way, hidden behind the backward pass
        or not."""
        return self._share_of_steps(lambda step: step.covered_by(COLLECTIVES))

    def load_of(self, device: str) -> Share | None:
        """As the driver or the system saw it; else the part of a step in which the device ran a
        pass."""
        seen = self._seen(device).get("utilization")
        if seen is not None:
            return Share(seen, "GPU load")
        if self.load and self._is_the_process(device) and self.load.get("cpu_share") is not None:
            return Share(self.load["cpu_share"] / self.threads_per_device, "CPU load")
        names = (
            REPLICA_WORK
            if any(e["event"] in REPLICA_WORK for step in self._recent for e in step.details)
            else WORK
        )
        busy = self._share_of_steps(lambda step: step.covered_by(names, device))
        return None if busy is None else Share(busy, "busy")

    @property
    def mean_load(self) -> float | None:
        loads = [load.value for device in self.devices if (load := self.load_of(device))]
        return statistics.mean(loads) if loads else None

    def memory_of(self, device: str) -> Held | None:
        """What the process holds where it is the device; else what the allocator or our count
        says."""
        capacity, event = self._capacity(device), self._memory.get(device)
        if device.startswith("cuda"):
            allocated = self._seen(device).get("allocated_bytes")
            if allocated is not None:
                return Held(allocated, capacity, "memory")
            return Held(event["bytes"], capacity, "peak memory") if event else None
        if self._is_the_process(device):
            if self.load and self.load.get("rss_bytes") is not None:
                return Held(self.load["rss_bytes"], capacity, "memory")
            peak = event.get("process_bytes") if event else None
            return None if peak is None else Held(peak, capacity, "peak memory")
        return Held(event["bytes"], capacity, "tensors") if event else None

    def _is_the_process(self, device: str) -> bool:
        """A CPU device that has a process to itself: what the system says of the process is true of
        the device."""
        return not device.startswith("cuda") and len(self.devices) == 1

    def _seen(self, device: str) -> dict[str, Any]:
        found = (self.load.get("devices") or ()) if self.load else ()
        return next((entry for entry in found if entry["device"] == device), {})

    def _capacity(self, device: str) -> int | None:
        kind, _, number = device.partition(":")
        gpus, host_bytes = self.machine["gpus"], self.machine["memory_bytes"]
        found: int | None = (
            host_bytes
            if kind != "cuda"
            else gpus[int(number)]["memory_bytes"]
            if int(number) < len(gpus)
            else None
        )
        return found

    def _share_of_steps(self, part: Callable[[Step], float]) -> float | None:
        detailed = [
            step for step in self._recent if any(event["event"] != "data" for event in step.details)
        ]
        together = sum(step.seconds for step in detailed)
        return sum(part(step) for step in detailed) / together if together else None


class Follower:
    """All ranks of a run, as far as their files tell."""

    def __init__(self, plan: Plan, folder: RunFolder) -> None:
        self.plan = plan
        self.machine: dict[str, Any] = json.loads(folder.manifest_path.read_text())["machine"]
        self.ranks = [
            RankProgress(rank, plan.threads_per_device, self.machine) for rank in plan.ranks
        ]
        self.losses: list[float] = []  # of the steps that all ranks have finished
        self._tails = [Tail(folder.events / f"rank{rank.rank}.jsonl") for rank in plan.ranks]
        self._first_start, self._last_end = float("inf"), 0.0

    def poll(self) -> list[Event]:
        """Read what is new; return the `start` events among it."""
        started = []
        for tail, rank in zip(self._tails, self.ranks, strict=True):
            for event in filter(is_complete, tail.new()):
                rank.take(event)
                if event["event"] == "start":
                    started.append(event)
                elif event["event"] == "step":
                    self._first_start = min(self._first_start, event["start"])
                    self._last_end = max(self._last_end, event["end"])
        done = min(len(rank.losses) for rank in self.ranks)
        for step in range(len(self.losses), done):
            self.losses.append(sum(rank.losses[step] for rank in self.ranks))
        return started

    @property
    def all_started(self) -> bool:
        return all(rank.started for rank in self.ranks)

    @property
    def done(self) -> int:
        return len(self.losses)

    @property
    def samples_per_second(self) -> float | None:
        return (
            self.done * self.plan.batch_size / (self._last_end - self._first_start)
            if self.done
            else None
        )

    @property
    def seconds_left(self) -> float | None:
        paces = [pace for rank in self.ranks if (pace := rank.seconds_per_step) is not None]
        return max(paces) * (self.plan.num_steps - self.done) if paces else None

    @property
    def cores_used(self) -> float | None:
        """Of the host, by all ranks together."""
        shares = [
            rank.load["cpu_share"]
            for rank in self.ranks
            if rank.load and rank.load.get("cpu_share") is not None
        ]
        return sum(shares) if len(shares) == len(self.ranks) else None
