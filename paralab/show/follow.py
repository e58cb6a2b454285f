"""Follow a run through its event files during training, and provide each rank's progress as plain
numbers.

Shares and times cover the last `RECENT_STEPS` steps. Unknown values are None.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paralab.analyse.manifest import RunManifest, manifest_of
from paralab.analyse.metrics import IN_PROCESS, transfers_and_waits
from paralab.analyse.recording import mean, median, seconds_between
from paralab.analyse.time_intervals import length
from paralab.machine.host import Machine
from paralab.plan.plan import Plan, RankPlan
from paralab.record.events import (
    DeviceLoad,
    End,
    Error,
    Event,
    Load,
    Memory,
    Resume,
    Span,
    Start,
    Step,
)
from paralab.record.folder import RunFolder
from paralab.record.reader import Tail, parse

RECENT_STEPS = 20
WORK = ("forward", "backward")
# These spans lie inside `forward` and `backward`, which wait for all replicas.
REPLICA_WORK = ("replica_forward", "replica_backward")


class Share(NamedTuple):
    """A load (0 to 1, or more if a process exceeds its cores) and how it was measured."""

    value: float
    measure: str


class MemoryUse(NamedTuple):
    """Memory in use, its capacity, and how it was measured."""

    bytes: int
    capacity_bytes: int | None
    measure: str


class Times(NamedTuple):
    """When the first rank started a step, when the last rank finished it, and its samples."""

    start: float
    end: float
    samples: int


@dataclass
class RankProgress:
    """One rank's progress so far."""

    plan: RankPlan
    threads_per_device: int
    machine: Machine
    started: Start | None = None
    error: Error | None = None
    ended: End | None = None
    losses: dict[int, float] = field(default_factory=dict)  # step -> this rank's part of its loss
    samples: int = 0
    load: Load | None = None
    _memory: dict[str, Memory] = field(default_factory=dict)
    _recent: deque[tuple[Step, list[Span]]] = field(
        default_factory=lambda: deque(maxlen=RECENT_STEPS)
    )
    _details: list[Span] = field(default_factory=list)  # spans and times of the unfinished step

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
            self.losses[event.step] = event.loss
            self.samples += event.samples
        elif isinstance(event, Span):
            self._details.append(event)
        elif isinstance(event, Error):
            self.error = event
        elif isinstance(event, End):
            self.ended = event

    def begin_attempt(self) -> None:
        """Forget the failed attempt, except the losses of steps that no later attempt repeats."""
        self.started = self.error = self.ended = None
        self._recent.clear()
        self._details = []

    @property
    def recent_events(self) -> list[Event]:
        return [event for step, details in self._recent for event in (*details, step)]

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
    def recent(self) -> dict[int, tuple[Step, list[Span]]]:
        """The last steps with details, keyed by step number."""
        return {
            step.step: (step, details)
            for step, details in self._recent
            if any(span.event != "data" for span in details)
        }

    def load_of(self, device: str) -> Share | None:
        """Return the reported load, or else the share of a step spent in passes."""
        if (gpu := self._gpu(device)) and gpu.utilization is not None:
            return Share(gpu.utilization, "GPU load")
        if self.load and self._is_the_process(device):
            return Share(self.load.cpu_share / self.threads_per_device, "CPU load")
        events = {span.event for _, details in self._recent for span in details}
        work = REPLICA_WORK if events.intersection(REPLICA_WORK) else WORK
        total = sum(step.seconds for step, _ in self.recent.values())
        covered = sum(_cover(details, work, device) for _, details in self.recent.values())
        return Share(covered / total, "busy") if total else None

    @property
    def mean_load(self) -> float | None:
        return mean([load.value for device in self.devices if (load := self.load_of(device))])

    def memory_of(self, device: str) -> MemoryUse | None:
        """Return the memory that CUDA's allocator, the process, or the counted tensors use."""
        capacity, event = self._capacity(device), self._memory.get(device)
        if device.startswith("cuda"):
            gpu = self._gpu(device)
            now, peak = gpu.allocated_bytes if gpu else None, event.bytes if event else None
        elif self._is_the_process(device):
            now = self.load.rss_bytes if self.load else None
            peak = event.process_bytes if event else None
        else:
            return MemoryUse(event.bytes, capacity, "tensors") if event else None
        if now is not None:
            return MemoryUse(now, capacity, "memory")
        return None if peak is None else MemoryUse(peak, capacity, "peak memory")

    def _is_the_process(self, device: str) -> bool:
        """Return whether the device is a CPU device and the process's only device."""
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


def _cover(spans: list[Span], names: Iterable[str], device: str | None = None) -> float:
    """Return the seconds during which at least one span with these names was running."""
    spans = [span for span in spans if span.event in names and device in (None, span.device)]
    return length(span.interval for span in spans)


class Follower:
    """The progress of all ranks in a run, according to the events they have written so far."""

    def __init__(self, plan: Plan, folder: RunFolder) -> None:
        self.plan = plan
        self.machine = manifest_of(folder.path, RunManifest).machine
        threads = plan.threads_per_device
        self.ranks = [RankProgress(rank, threads, self.machine) for rank in plan.ranks]
        self.loss_of: dict[int, float] = {}  # step -> loss, for the steps that all ranks finished
        self.times_of: dict[int, Times] = {}  # step -> times, for the steps in `loss_of`
        self.attempt = 0
        self.events_read = 0
        self._unfinished: dict[int, Times] = {}  # times of steps that only some ranks finished
        self._events = folder.events
        self._tails = self._open()

    def _open(self) -> list[Tail[Event]]:
        """Open the event files of the current attempt."""
        attempt = f".{self.attempt}" if self.attempt else ""
        files = [f"rank{rank.plan.rank}{attempt}.jsonl" for rank in self.ranks]
        return [Tail(self._events / file, parse) for file in files]

    def poll(self) -> list[Start]:
        """Read the new events, and return the `start` events among them."""
        started = self._read()
        while any(self._events.glob(f"rank*.{self.attempt + 1}.jsonl")):  # the run was restarted
            self.attempt += 1
            self._tails = self._open()
            self._unfinished.clear()
            for rank in self.ranks:
                rank.begin_attempt()
            started += self._read()
        return started

    def _read(self) -> list[Start]:
        started = []
        for tail, rank in zip(self._tails, self.ranks, strict=True):
            for event in tail.new():
                self.events_read += 1
                if isinstance(event, Resume | Step):
                    self._forget_from(event.step, rank)
                rank.take(event)
                if isinstance(event, Start):
                    started.append(event)
                elif isinstance(event, Step):
                    self._add(event)
        return started

    def _add(self, step: Step) -> None:
        """Add a rank's step. If all ranks have finished it, also add its loss and time."""
        start, end, samples = self._unfinished.get(step.step, (*step.interval, 0))
        self._unfinished[step.step] = Times(
            min(start, step.start), max(end, step.end), samples + step.samples
        )
        if all(step.step in rank.losses for rank in self.ranks):
            self.loss_of[step.step] = sum(rank.losses[step.step] for rank in self.ranks)
            self.times_of[step.step] = self._unfinished.pop(step.step)

    def _forget_from(self, step: int, rank: RankProgress) -> None:
        """Forget the steps that a restarted rank repeats."""
        for steps in (rank.losses, self.loss_of, self.times_of):
            while steps and next(reversed(steps)) >= step:
                steps.popitem()

    @property
    def losses(self) -> list[float]:
        return list(self.loss_of.values())

    def communication_share(self, rank: int) -> float | None:
        """Return the share of a step in which this rank's buckets are transferred, as in the
        summary. Waiting for a slower rank does not count."""
        recents = [each.recent for each in self.ranks]
        moved, lengths = [], []
        for number in set.intersection(*(set(recent) for recent in recents)):
            steps = [recent[number] for recent in recents]
            lengths.append(seconds_between([[step for step, _ in steps]]))
            if self.plan.strategy == "dp":
                moved.append(_cover(steps[rank][1], IN_PROCESS))
            else:
                transfers, _ = transfers_and_waits([spans for _, spans in steps], rank)
                moved.append(length(transfers))
        total = median(lengths)
        return (median(moved) or 0.0) / total if total else None

    @property
    def all_started(self) -> bool:
        return all(rank.started for rank in self.ranks)

    @property
    def done(self) -> int:
        """The number of finished steps, including steps before the run was resumed."""
        return next(reversed(self.loss_of), -1) + 1

    @property
    def samples_per_second(self) -> float | None:
        return samples_per_second(list(self.times_of.values())[-RECENT_STEPS:])

    @property
    def seconds_left(self) -> float | None:
        paces = [pace for rank in self.ranks if (pace := rank.seconds_per_step) is not None]
        return max(paces) * (self.plan.num_steps - self.done) if paces else None

    @property
    def cores_used(self) -> float | None:
        shares = [rank.load.cpu_share for rank in self.ranks if rank.load]
        return sum(shares) if len(shares) == len(self.ranks) else None


def samples_per_second(steps: Sequence[Times]) -> float | None:
    """Return the rate over these steps, including the time between them."""
    if not steps or steps[-1].end <= steps[0].start:
        return None
    return sum(step.samples for step in steps) / (steps[-1].end - steps[0].start)
