"""Export a run as a Chrome trace for ui.perfetto.dev or chrome://tracing, with all ranks and
devices on one clock.

A rank is a process in the trace. Its threads are *lanes*: one for the steps, one for data loading,
one per device, and one for communication. Spans in a lane must be nested or disjoint, so a span
that crosses another one gets an additional lane with the same name. Arrows (flows) show
dependencies: an all-reduce across ranks, a micro-batch from stage to stage, and a batch from
scatter to gather.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paralab.analyse.recording import Recording
from paralab.analyse.time_intervals import lanes
from paralab.record.events import (
    COLLECTIVES,
    Collective,
    Error,
    Event,
    Load,
    Memory,
    Span,
    SplitShape,
)

# An event in Chrome's trace format. Its keys depend on its phase `ph`.
TraceEvent = dict[str, Any]
# rank -> its replica and shard, whose stages form a pipeline
Pipelines = dict[int, tuple[int, int]]

STEPS, LOADING, COMMUNICATION = "steps", "data loading", "communication"
LANES = {"step": STEPS, "data": LOADING, **dict.fromkeys(COLLECTIVES, COMMUNICATION)}
# Fields that are not repeated as arguments: the slice already shows its name, position, and lane.
NOT_ARGUMENTS = ("event", "start", "end", "time", "device")
# Viewers disagree on whether thread ids are per process, so ids are unique in the entire trace.
TIDS_PER_PID = 1000


@dataclass(frozen=True)
class Slice:
    """A span in the trace. Times are whole microseconds, so adjacent spans stay adjacent."""

    event: Span
    rank: int
    tid: int
    start_us: int
    end_us: int

    @property
    def where(self) -> TraceEvent:
        return {"pid": _pid(self.rank), "tid": self.tid}


def trace_of(folder: Path) -> TraceEvent:
    """Create the trace from the manifest and the events. A killed run lacks its last events."""
    recording = Recording.read(folder)
    manifest, plan = recording.manifest, recording.plan
    events: list[TraceEvent] = []
    slices: list[Slice] = []
    for rank in plan.ranks:
        devices = list(dict.fromkeys(device.name for device in rank.devices))
        own = recording.events.get(rank.rank, [])
        placed, names = _place(rank.rank, own, devices)
        slices += placed
        events += _names(rank.rank, f"rank {rank.rank} · {', '.join(devices)}", names)
        events += _instants(rank.rank, own, next(iter(names)))
        events += _counters(rank.rank, own)
    events += [_complete(slice_) for slice_ in slices]
    events += _loss(recording)
    pipeline_of = {rank.rank: (rank.replica, rank.shard or 0) for rank in plan.ranks}
    events += _flows(slices, pipeline_of)
    # Names come first, then events by time. At equal times, the longer slice comes first because it
    # contains the other, and arrows follow their slices.
    events.sort(key=lambda event: (event.get("ts", -1), -event.get("dur", 0)))
    about = {"strategy": plan.strategy, "workload": manifest.workload.name}
    about |= {"arithmetic": plan.arithmetic, "created": manifest.created}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _pid(rank: int) -> int:
    return rank + 1  # 0 is the idle process in Perfetto


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _place(
    rank: int, events: list[Event], devices: list[str]
) -> tuple[list[Slice], dict[int, str]]:
    """Return a rank's slices and its lanes (thread id -> name, in display order)."""
    names_in_order = (STEPS, LOADING, *devices, COMMUNICATION)
    by_lane: dict[str, list[Span]] = {name: [] for name in names_in_order}
    for event in events:
        if isinstance(event, Span):
            # scatter, gather, and optimizer run on the rank's first device
            lane_name = LANES.get(event.event) or event.device or devices[0]
            by_lane.setdefault(lane_name, []).append(event)

    slices: list[Slice] = []
    names: dict[int, str] = {}
    for name, spans in by_lane.items():
        times = [(_us(span.start), _us(span.end)) for span in spans]
        numbers = lanes(times, nested=name != COMMUNICATION)
        first = _pid(rank) * TIDS_PER_PID + len(names) + 1
        for span, time, lane in zip(spans, times, numbers, strict=True):
            slices.append(Slice(span, rank, first + lane, *time))
        if spans or name in (STEPS, *devices):
            for lane in range(max(numbers, default=0) + 1):
                names[first + lane] = f"{name} ({lane + 1})" if lane else name
    return slices, names


def _names(rank: int, title: str, names: dict[int, str]) -> Iterator[TraceEvent]:
    """Name the rank's process and its lanes, in display order."""

    def metadata(what: str, tid: int, **args: Any) -> TraceEvent:
        return {"ph": "M", "name": what, "pid": _pid(rank), "tid": tid, "args": args}

    yield metadata("process_name", 0, name=title)
    yield metadata("process_sort_index", 0, sort_index=rank)
    for place, (tid, name) in enumerate(names.items()):
        yield metadata("thread_name", tid, name=name)
        yield metadata("thread_sort_index", tid, sort_index=place)


def _complete(slice_: Slice) -> TraceEvent:
    event, duration = slice_.event, slice_.end_us - slice_.start_us
    name = f"step {event.step}" if event.event == "step" else event.event
    shown = {"ph": "X", "name": name, "cat": event.event, "ts": slice_.start_us, "dur": duration}
    return {**shown, **slice_.where, "args": _arguments(event)}


def _arguments(event: Event) -> TraceEvent:
    """Return an event's other fields. NaN becomes text, because viewers reject a file with NaN."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in event.known.items()
        if name not in NOT_ARGUMENTS
    }


def _instants(rank: int, events: list[Event], tid: int) -> Iterator[TraceEvent]:
    """Yield instant events for device inputs and process errors, on the steps lane. On a device
    lane, Perfetto would attach the surrounding pass's arrow to them."""
    for event in events:
        if isinstance(event, SplitShape):
            shown = {"name": f"split {event.shape} on {event.device}", "s": "t"}
        elif isinstance(event, Error):
            shown = {"name": event.error, "s": "p"}
        else:
            continue
        where = {"ts": _us(event.time), "pid": _pid(rank), "tid": tid}
        yield {"ph": "i", "cat": event.event, **shown, **where, "args": _arguments(event)}


def _counters(rank: int, events: list[Event]) -> Iterator[TraceEvent]:
    """Yield known load and memory over time. Perfetto shows a counter's name and unit as one
    phrase, so each unit is worded to follow the name."""
    for event in events:
        values: list[tuple[str, str, float | None]] = []
        if isinstance(event, Load):
            values.append(("process load", "in cores", event.cpu_share))
            values.append(("process memory", "in bytes", event.rss_bytes))
            for load in event.devices:
                values += [
                    (f"load {load.device}", "as a share", load.utilization),
                    (f"memory {load.device} allocated", "in bytes", load.allocated_bytes),
                    (f"memory {load.device} used by all", "in bytes", load.used_bytes),
                ]
        elif isinstance(event, Memory):
            values.append((f"peak memory {event.device}", "in bytes", event.bytes))
        for name, unit, value in values:
            if value is not None:
                yield _counter(rank, name, event["time"], unit, value)


def _counter(rank: int, name: str, time: float, unit: str, value: float) -> TraceEvent:
    return {"ph": "C", "name": name, "pid": _pid(rank), "ts": _us(time), "args": {unit: value}}


def _loss(recording: Recording) -> Iterator[TraceEvent]:
    """Yield each step's batch loss, on rank 0, when the last rank finishes the step."""
    for step, loss in zip(recording.steps, recording.losses, strict=True):
        if math.isfinite(loss):
            yield _counter(0, "loss", max(event.end for event in step), "of the batch", loss)


def _flows(slices: list[Slice], pipeline_of: Pipelines) -> list[TraceEvent]:
    """Return all arrows. Their ids must be unique."""
    chains = [
        *((chain[0].event.event.replace("_", "-"), chain) for chain in _collectives(slices)),
        *(("micro-batch", chain) for chain in _stage_to_stage(slices, pipeline_of)),
        *(("replica", chain) for chain in _scatter_to_gather(slices)),
    ]
    arrows: list[TraceEvent] = []
    for name, chain in chains:
        arrows += _arrow(len(arrows), name, chain)
    return arrows


def _collectives(slices: list[Slice]) -> Iterator[list[Slice]]:
    """Yield each bucket's slices on all ranks in a step. The rank that is ready first comes first."""
    same: dict[tuple[Any, ...], list[Slice]] = defaultdict(list)
    times: Counter[tuple[Any, ...]] = Counter()
    for slice_ in slices:
        e = slice_.event
        if isinstance(e, Collective):
            key = (e.event, e.ranks, e.step, e.accumulation, e.stage, e.micro, e.bucket, e.replica)
            same[*key, times[slice_.rank, *key]].append(slice_)
            times[slice_.rank, *key] += 1
    for chain in same.values():
        yield sorted(chain, key=lambda slice_: slice_.start_us)


def _stage_to_stage(slices: list[Slice], pipeline_of: Pipelines) -> Iterator[list[Slice]]:
    """Connect the stages of a micro-batch: forward in order, and backward in reverse."""
    for name, direction in (("forward", 1), ("backward", -1)):
        passes: dict[tuple[Any, ...], list[Slice]] = defaultdict(list)
        for slice_ in slices:
            e = slice_.event
            # The half of a backward pass that computes weight gradients does not send anything.
            if e.event == name and e.stage is not None and not e.weights:
                pipeline = pipeline_of[slice_.rank]
                passes[pipeline, e.step, e.accumulation, e.micro, e.stage].append(slice_)
        for (*same, stage), list_ in passes.items():
            following = passes.get((*same, stage + direction), [])
            yield from (list(pair) for pair in zip(list_, following, strict=False))


def _scatter_to_gather(slices: list[Slice]) -> Iterator[list[Slice]]:
    """Connect scatter, the replicas, and gather in emulated DataParallel, once per pass."""
    per_step: dict[tuple[int, int], dict[str, list[Slice]]] = defaultdict(lambda: defaultdict(list))
    for slice_ in slices:
        if slice_.event.event in ("scatter", "replica_forward", "gather"):
            per_step[slice_.rank, slice_.event.step][slice_.event.event].append(slice_)
    for parts in per_step.values():
        for scatter, gather in zip(parts["scatter"], parts["gather"], strict=False):
            for replica in parts["replica_forward"]:
                if scatter.start_us <= replica.start_us < gather.start_us:
                    yield [scatter, replica, gather]


def _arrow(id_: int, name: str, chain: list[Slice]) -> list[TraceEvent]:
    """Create the start, step, and finish events of one arrow. A viewer attaches each event to the
    slice around it, and the times must not decrease:

        leaves   when the second slice starts, but no later than the first slice's last microsecond
        arrives  when the slice begins, but not before the arrow has left

    Return no arrow if that is impossible: a slice is too short, or ends before the arrow arrives.
    """
    if len(chain) < 2:
        return []
    first, second = chain[:2]
    moment = max(first.start_us, min(second.start_us, first.end_us - 1))
    events = []
    for number, slice_ in enumerate(chain):
        moment = max(moment, slice_.start_us)
        if moment >= slice_.end_us:  # the next slice may start at the same microsecond
            return []
        arrow = {"name": name, "cat": "flow", "id": id_, "ts": moment, **slice_.where}
        events.append({"ph": "t" if number else "s", **arrow})
    events[-1] |= {"ph": "f", "bp": "e"}
    return events
