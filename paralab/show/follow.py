"""Follow a run through its event files during training, and provide each rank's progress as plain
numbers.

Shares and times cover the last `RECENT_STEPS` steps. Unknown values are None.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from paralab.analyse.manifest import RunManifest, manifest_of
from paralab.analyse.recording import mean, median
from paralab.analyse.time_intervals import length
from paralab.machine.host import Machine
from paralab.plan.plan import Plan, RankPlan
from paralab.record.events import COLLECTIVES, DeviceLoad, Event, Load, Memory, Span, Start, Step
from paralab.record.folder import RunFolder
from paralab.record.reader import Tail

RECENT_STEPS = 20
WORK = ("forward", "backward")
# These spans lie inside `forward` and `backward`, which wait for all replicas.
REPLICA_WORK = ("replica_forward", "replica_backward")


class Share(NamedTuple):
    """A load and how it was measured: 0 to 1, or more if a process exceeds its cores."""

    value: float
    measure: str


class Held(NamedTuple):
    """Memory in use, its capacity, and how it was measured."""

    bytes: int
    capacity_bytes: int | None
    measure: str


@dataclass
class RankProgress:
    """One rank's progress so far."""

    plan: RankPlan
    threads_per_device: int
    machine: Machine
    started: Start | None = None
    losses: list[float] = field(default_factory=list)  # this rank's part of each loss
    samples: int = 0
    load: Load | None = None
    _memory: dict[str, Memory] = field(default_factory=dict)
    _recent: deque[tuple[Step, list[Span]]] = field(
        default_factory=lambda: deque(maxlen=RECENT_STEPS)
    )
    _details: list[Span] = field(default_factory=list)  # details of the unfinished step

    @property
    def devices(self) -> list[str]:
        return list(dict.fromkeys(device.name for device in self.plan.devices))

    def take(self, event: Event) -> None:
        if isinstance(event, Start):
            self.started = event
        elif isinstance(event, Load):
            self.load = event
        elif isinstance(event, Memory):
            self._memory[event.device] = event
        elif isinstance(event, Step):
            self._recent.append((event, self._details))
            self._details = []
            self.losses.append(event.loss)
            self.samples += event.samples
        elif isinstance(event, Span):
            self._details.append(event)

    @property
    def step_seconds(self) -> float | None:
        return median([step.seconds for step, _ in self._recent])

    @property
    def data_seconds(self) -> float | None:
        """Seconds per step that the rank waits for data loading."""
        return median([_cover(details, ("data",)) for _, details in self._recent])

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds from the end of one step to the end of the next."""
        ends = [step.end for step, _ in self._recent]
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None

    @property
    def communication_share(self) -> float | None:
        """The share of a step with a running collective, even if backward hides it."""
        return self._share_of_steps(COLLECTIVES)

    def load_of(self, device: str) -> Share | None:
        """Return the reported load, or else the share of a step spent in passes."""
        if (gpu := self._gpu(device)) and gpu.utilization is not None:
            return Share(gpu.utilization, "GPU load")
        if self.load and self._is_the_process(device):
            return Share(self.load.cpu_share / self.threads_per_device, "CPU load")
        events = {span.event for _, details in self._recent for span in details}
        work = REPLICA_WORK if events.intersection(REPLICA_WORK) else WORK
        busy = self._share_of_steps(work, device)
        return None if busy is None else Share(busy, "busy")

    @property
    def mean_load(self) -> float | None:
        return mean([load.value for device in self.devices if (load := self.load_of(device))])

    def memory_of(self, device: str) -> Held | None:
        """Return the process's memory if the process runs only this device. Otherwise, return the
        memory that the allocator reports or that paralab counted."""
        capacity, event = self._capacity(device), self._memory.get(device)
        if device.startswith("cuda"):
            gpu = self._gpu(device)
            now, peak = gpu.allocated_bytes if gpu else None, event.bytes if event else None
        elif self._is_the_process(device):
            now = self.load.rss_bytes if self.load else None
            peak = event.process_bytes if event else None
        else:
            return Held(event.bytes, capacity, "tensors") if event else None
        if now is not None:
            return Held(now, capacity, "memory")
        return None if peak is None else Held(peak, capacity, "peak memory")

    def _is_the_process(self, device: str) -> bool:
        """Return whether the device is a CPU device that has the process to itself."""
        return not device.startswith("cuda") and len(self.devices) == 1

    def _gpu(self, device: str) -> DeviceLoad | None:
        devices = self.load.devices if self.load else ()
        return next((each for each in devices if each.device == device), None)

    def _capacity(self, device: str) -> int | None:
        kind, _, number = device.partition(":")
        if kind != "cuda":
            return self.machine.memory_bytes
        gpus = self.machine.gpus
        return gpus[int(number)].memory_bytes if int(number) < len(gpus) else None

    def _share_of_steps(self, names: Iterable[str], device: str | None = None) -> float | None:
        """Return the share of time that these spans cover, in steps with details."""
        detailed = [
            (step.seconds, _cover(details, names, device))
            for step, details in self._recent
            if any(span.event != "data" for span in details)
        ]
        total = sum(seconds for seconds, _ in detailed)
        return sum(covered for _, covered in detailed) / total if total else None


def _cover(spans: list[Span], names: Iterable[str], device: str | None = None) -> float:
    """Return the seconds during which at least one span with these names was running."""
    return length(
        span.interval for span in spans if span.event in names and device in (None, span.device)
    )


class Follower:
    """The progress of all ranks in a run, as far as they have written events."""

    def __init__(self, plan: Plan, folder: RunFolder) -> None:
        self.plan = plan
        self.machine = manifest_of(folder.path, RunManifest).machine
        self.ranks = [
            RankProgress(rank, plan.threads_per_device, self.machine) for rank in plan.ranks
        ]
        self.losses: list[float] = []  # one per step that all ranks have finished
        self._tails = [Tail(folder.events / f"rank{rank.rank}.jsonl") for rank in plan.ranks]
        self._first_start, self._last_end = float("inf"), 0.0

    def poll(self) -> list[Start]:
        """Read the new events, and return the `start` events among them."""
        started = []
        for tail, rank in zip(self._tails, self.ranks, strict=True):
            for event in tail.new():
                rank.take(event)
                if isinstance(event, Start):
                    started.append(event)
                elif isinstance(event, Step):
                    self._first_start = min(self._first_start, event.start)
                    self._last_end = max(self._last_end, event.end)
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
        if not self.done:
            return None
        return self.done * self.plan.batch_size / (self._last_end - self._first_start)

    @property
    def seconds_left(self) -> float | None:
        paces = [pace for rank in self.ranks if (pace := rank.seconds_per_step) is not None]
        return max(paces) * (self.plan.num_steps - self.done) if paces else None

    @property
    def cores_used(self) -> float | None:
        """The number of CPU cores that all ranks use in total."""
        shares = [rank.load.cpu_share for rank in self.ranks if rank.load]
        return sum(shares) if len(shares) == len(self.ranks) else None
