"""Create chart data from a run folder: the timeline, the pipeline schedule, load and memory over
time, and the batch split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from paralab.analyse.blocks import Line, Lines, Part, Schedule, Slot, Span, Split, Timeline
from paralab.analyse.compare import Row
from paralab.analyse.metrics import (
    blocked,
    collectives,
    computing,
    pass_bubbles,
    pipelines_of,
    transfers_and_waits,
)
from paralab.analyse.recording import Recording
from paralab.analyse.result import Batch, Rank
from paralab.analyse.time_intervals import Interval, lanes, without
from paralab.plan.schedules import ideal_bubble, order, simulate
from paralab.record.events import COLLECTIVES, Load, Step
from paralab.record.events import Span as SpanEvent
from paralab.units import plural

KINDS = {
    "replica_forward": "forward",
    "replica_backward": "backward",
}  # draw a replica's work like any other work
MOST_SPANS = 600  # per timeline, to keep the page small
MOST_POINTS = 300
GAP_SECONDS = 0.1  # between two runs on one time axis

Curves = dict[str, list[tuple[float, float]]]
T = TypeVar("T")


def timeline(recording: Recording, steps: int = 2) -> Timeline | None:
    """Draw the last measured steps on all ranks: each device's work and each bucket's transfer.
    Time 0 is the start of the first drawn step."""
    detailed = [recording.step(number) for number in recording.detailed]
    for number in range(min(steps, len(detailed)), 0, -1):
        found = _timeline(recording, detailed[-number:])
        if len(found.spans) <= MOST_SPANS or number == 1:
            return found
    return None


def _timeline(recording: Recording, steps: list[list[Step]]) -> Timeline:
    origin = min(event.start for event in steps[0])
    names: list[str] = []
    spans: list[Span] = []
    for rank in recording.plan.ranks:
        devices = list(dict.fromkeys(device.name for device in rank.devices))
        base = len(names)
        names += [f"rank {rank.rank} · {device}" for device in devices]
        events = [event for step in steps for event in recording.spans(rank.rank, step[0].step)]
        reduced = collectives(events)
        rows = lanes([event.interval for event in reduced], nested=False)
        what = "shards" if any(event.unit for event in reduced) else "all-reduce"
        names += [
            f"rank {rank.rank} · {what}" + (f" {n + 1}" if n else "")
            for n in range(max(rows, default=-1) + 1)
        ]
        for event, row in zip(reduced, rows, strict=True):
            spans.append(_span(event, base + len(devices) + row, origin))
        for step in steps:
            own = recording.spans(rank.rank, step[0].step)
            spans += _work(own, devices, base, origin)
            spans += _exposed(recording, rank.rank, step[0].step, base, origin)
        spans += [
            _span(event, base, origin)
            for event in recording.named("data", rank.rank)
            if _between(event, steps)
        ]
    ends = tuple(
        (
            step[0].step,
            min(e.start for e in step) - origin,
            max(e.end for e in step) - origin,
        )
        for step in steps
    )
    return Timeline("the last steps", tuple(names), tuple(spans), ends)


def _work(own: list[SpanEvent], devices: list[str], base: int, origin: float) -> list[Span]:
    """Return each device's work. If replicas have their own spans, drop the process's forward
    and backward spans that contain them."""
    replicas = {event.event for event in own} & KINDS.keys()
    clipped = dict(zip((id(e) for e in own if e.event == "backward"), computing(own), strict=True))
    found = []
    for event in own:
        if event.event in (*COLLECTIVES, "data") or (
            replicas and event.event in ("forward", "backward")
        ):
            continue
        lane = base + devices.index(event.device) if event.device in devices else base
        found.append(_span(event, lane, origin, clipped.get(id(event))))
    return found


def _exposed(recording: Recording, rank: int, step: int, base: int, origin: float) -> list[Span]:
    """Return the spans in which the rank's first device only waits for a slower rank or a
    transfer."""
    own = recording.spans(rank, step)
    busy = [(e.start, e.end) for e in own if e.event in ("forward", "optimizer")] + computing(own)
    busy = without(busy, blocked(own))
    transfers, waits = transfers_and_waits(recording, rank, step)
    found = []
    for label, intervals in (
        ("waiting for a slower rank", waits),
        ("exposed communication", transfers),
    ):
        for start, end in without(intervals, busy):
            exposed = intervals is transfers
            found.append(
                Span(
                    base,
                    "wait",
                    label,
                    start - origin,
                    end - origin,
                    exposed,
                    details={"step": step},
                )
            )
    return found


def _span(event: SpanEvent, lane: int, origin: float, interval: Interval | None = None) -> Span:
    start, end = interval or event.interval
    kind = KINDS.get(event.event, event.event)
    hidden = ("event", "start", "end", "device")
    details = {name: value for name, value in event.known.items() if name not in hidden}
    if event.unit is not None:
        return Span(lane, kind, event.unit, start - origin, end - origin, details=details)
    label = (
        f"bucket {event.bucket}"
        if kind == "all_reduce"
        else f"{kind} {event.micro}"
        if event.micro is not None
        else kind
    )
    return Span(lane, kind, label, start - origin, end - origin, details=details)


def _between(event: SpanEvent, steps: list[list[Step]]) -> bool:
    return steps[0][0].start <= event.start <= steps[-1][0].end


def schedule(recording: Recording) -> Schedule | None:
    """Draw one pass of the last measured step through the first replica's stages, and the ideal
    schedule."""
    plan = recording.plan
    stages, micro_batches, name = plan.stages, plan.micro_batches, plan.schedule
    if stages < 2 or not recording.detailed:
        return None
    own = pipelines_of(recording, recording.detailed[-1])[0]
    work = [
        event
        for event in own
        if event.event in ("forward", "backward")
        and not event.accumulation
        and event.stage is not None
    ]
    if not work:
        return None
    passes = [event for event in own if event.event == "backward"]
    clipped = {id(e): interval for e, interval in zip(passes, computing(own), strict=True)}
    origin = min(event.start for event in work)
    measured = []
    for event in work:
        start, end = clipped.get(id(event), event.interval)
        part, stage = divmod(event.stage or 0, stages)
        measured.append(
            Slot(
                stage,
                event.micro or 0,
                event.event == "backward",
                start - origin,
                end - origin,
                part,
                bool(event.weights),
            )
        )
    if name:
        devices = [
            f"rank {rank.rank} · {rank.devices[0].name}" for rank in plan.ranks if not rank.replica
        ]
    else:
        devices = [device.name for device in plan.ranks[0].devices]
    who = "replica 0" if name else "rank 0"
    return Schedule(
        f"{who}, {plural(micro_batches, 'micro-batch')} through {stages} stages",
        tuple(f"stage {stage} · {device}" for stage, device in enumerate(devices)),
        tuple(measured),
        tuple(ideal_slots(stages, micro_batches, name or "gpipe")),
        pass_bubbles(own, stages)[0],
        ideal_bubble(stages, micro_batches, name or "gpipe"),
        IDEAL[name or "gpipe"],
    )


IDEAL = {
    "gpipe": "In the ideal schedule (GPipe), all forward and backward passes take the same time.",
    "1f1b": "In the ideal schedule (1F1B), all forward and backward passes take the same time.",
    "interleaved": "In the ideal schedule, all passes take the same time. Each stage has two parts of "
    "the model; a prime marks passes of the second part.",
    "zero-bubble": "In the ideal schedule, forward, input, and weight passes take the same time. A "
    "prime marks the second part of a stage. The model's input needs no gradient, so the "
    "first part has only weight passes.",
}


def ideal_slots(stages: int, micro_batches: int, name: str = "gpipe") -> list[Slot]:
    """Return all passes in schedule order, each one slot long.

    gpipe, 2 stages, 3 micro-batches    stage 0   F0 F1 F2 ·· ·· B0 B1 B2
                                        stage 1   ·· F0 F1 F2 B0 B1 B2 ··
    """
    return [
        Slot(slot.rank, micro, kind != "F", slot.start, slot.end, part // stages, kind == "W")
        for slot in simulate(order(name, stages, micro_batches))
        for part, kind, micro in [slot.action]
    ]


def load_lines(recordings: Sequence[Recording], title: str = "load") -> Lines | None:
    """Draw each GPU's load as reported by NVML or, without a GPU, the cores that each rank used."""
    lines: Curves = {}
    for rank, time, event in _samples(recordings):
        for gpu in event.devices:
            if gpu.utilization is not None:
                lines.setdefault(f"{gpu.device} · NVML (rank {rank})", []).append(
                    (time, gpu.utilization)
                )
        if not event.devices:
            lines.setdefault(f"rank {rank} · cores", []).append((time, event.cpu_share))
    on_gpu = any("NVML" in name for name in lines)
    y, unit = (
        ("share of time with a running kernel", "share") if on_gpu else ("cores in use", "number")
    )
    return _lines(title, lines, y, unit)


def memory_lines(recordings: Sequence[Recording], title: str = "memory") -> Lines | None:
    """Draw the memory allocated on each GPU or, without a GPU, each process's memory."""
    lines: Curves = {}
    for rank, time, event in _samples(recordings):
        for gpu in event.devices:
            lines.setdefault(f"rank {rank} · {gpu.device}", []).append(
                (time, gpu.allocated_bytes or 0)
            )
        if not event.devices and event.rss_bytes is not None:
            lines.setdefault(f"rank {rank} · process", []).append((time, event.rss_bytes))
    return _lines(title, lines, "memory", "bytes")


def _samples(recordings: Sequence[Recording]) -> Iterator[tuple[int, float, Load]]:
    """Yield (rank, seconds, `load` event) for several runs on one time axis, without the time
    between runs."""
    offset = 0.0
    for recording in recordings:
        times = [event.time for event in recording.of(Load)]
        begin = min(times, default=0.0)
        for rank in range(recording.world_size):
            for event in recording.of(Load, rank):
                yield rank, offset + event.time - begin, event
        offset += max(times, default=0.0) - begin + GAP_SECONDS


def _lines(title: str, lines: Curves, y: str, unit: str) -> Lines | None:
    shown = tuple(Line(name, tuple(thin(sorted(points)))) for name, points in lines.items())
    return Lines(title, shown, "seconds", y, unit) if shown else None


def thin(points: Sequence[T]) -> Sequence[T]:
    """Return at most `MOST_POINTS` points, evenly spaced."""
    step = -(-len(points) // MOST_POINTS)
    return points[:: step or 1]


def loss_lines(rows: Sequence[Row]) -> Lines | None:
    """Draw the losses of all configurations. If they train the same, one curve hides the others."""
    lines = []
    for row in rows:
        points = [(float(step), loss) for step, loss in enumerate(row.losses) if loss is not None]
        if points:
            lines.append(Line(row.name, tuple(thin(points))))
    return (
        Lines("Loss", tuple(lines), "optimizer step", "global batch loss", "number")
        if lines
        else None
    )


def split(batch: Batch, ranks: Sequence[Rank]) -> Split:
    """Draw the batch split over devices, divided into passes and micro-batches."""
    parts = []
    for rank in ranks:
        if rank.stage:  # all stages in a replica process the same samples
            continue
        if rank.roles[0].startswith("replica "):  # DataParallel: one process, one share per replica
            pieces = [
                (device, held, batch.accumulate)
                for device, held in zip(rank.devices, rank.split, strict=True)
            ]
        else:
            cuts = batch.accumulate * batch.micro_batches
            pieces = [
                (
                    f"rank {rank.rank} · {' → '.join(rank.devices)}",
                    rank.samples_per_step,
                    cuts,
                )
            ]
        for label, held, cuts in pieces:
            parts.append(
                Part(label, tuple(held // cuts + (place < held % cuts) for place in range(cuts)))
            )
    return Split(batch.arithmetic, batch.size, tuple(parts))
