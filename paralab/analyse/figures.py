"""Create chart data from a run folder: timeline, schedule, load, memory, losses, batch split."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from paralab.analyse import metrics
from paralab.analyse.blocks import Line, Lines, Part, Schedule, Slot, Span, Split, Timeline
from paralab.analyse.compare import Row
from paralab.analyse.recording import Recording, bounds
from paralab.analyse.result import Batch, Rank
from paralab.analyse.time_intervals import lanes
from paralab.plan.batches import even_sizes, pieces
from paralab.plan.schedules import ideal_bubble, order, simulate
from paralab.record.events import COLLECTIVES, Load, Step
from paralab.record.events import Span as SpanEvent
from paralab.units import measure, plural

# Draw a replica's passes like those of a process.
KINDS = {"replica_forward": "forward", "replica_backward": "backward"}
MOST_SPANS = 600  # spans per timeline, to keep the page small
CLOCK_DIGITS = 7  # the clock's noise is larger than a tenth of a microsecond
MOST_POINTS = 300  # points per curve
GAP_SECONDS = 0.1  # space between two runs on one time axis

Points = list[tuple[float, float]]
Values = Mapping[str, float | None]  # curve name -> value


def timeline(recording: Recording, most_spans: int = MOST_SPANS) -> Timeline | None:
    """Draw the last two measured steps, or only the last one if they have too many spans or are
    far apart."""
    numbers = recording.detailed[-2:]
    if not numbers:
        return None
    are_neighbors = numbers[-1] - numbers[0] <= 1
    steps = [recording.step(number) for number in (numbers if are_neighbors else numbers[-1:])]
    drawn = _timeline(recording, steps)
    return drawn if len(drawn.spans) <= most_spans else _timeline(recording, steps[-1:])


def _timeline(recording: Recording, steps: list[list[Step]]) -> Timeline:
    """Draw each device's work and each bucket's transfer. Time 0 is the start of the first step."""
    names: list[str] = []
    spans: list[Span] = []
    for rank in recording.plan.ranks:
        devices = list(dict.fromkeys(device.name for device in rank.devices))
        base = len(names)
        names += [f"rank {rank.rank} · {device}" for device in devices]

        events = [event for step in steps for event in recording.spans(rank.rank, step[0].step)]
        transfers = metrics.collectives(events)
        rows = lanes([event.interval for event in transfers], nested=False)
        gathers = any(event.event != "all_reduce" for event in transfers)
        what = "shards" if gathers else "all-reduce"
        names += [
            f"rank {rank.rank} · {what}" + (f" {n + 1}" if n else "")
            for n in range(max(rows, default=-1) + 1)
        ]
        for event, row in zip(transfers, rows, strict=True):
            spans.append(_span(event, base + len(devices) + row))
        for step in steps:
            spans += _work(recording.spans(rank.rank, step[0].step), devices, base)
            spans += _exposed(recording, rank.rank, step[0].step, base)
        begin, end = steps[0][0].start, steps[-1][0].end
        data = recording.named("data", rank.rank)
        spans += [_span(event, base) for event in data if begin <= event.start <= end]

    origin, _ = bounds(steps)

    def since(time: float) -> float:
        return round(time - origin, CLOCK_DIGITS)

    shown = (replace(s, start=since(s.start), end=since(s.end)) for s in spans)
    numbered = ((step[0].step, *bounds([step])) for step in steps)
    ends = ((number, since(begin), since(end)) for number, begin, end in numbered)
    title = "The last steps" if len(steps) > 1 else "The last step"
    return Timeline(title, tuple(names), tuple(shown), tuple(ends))


def _work(spans: list[SpanEvent], devices: list[str], base: int) -> Iterator[Span]:
    """Yield each device's work. Replicas' own spans replace the process's passes."""
    dropped = {*COLLECTIVES, "data"}
    if any(event.event in KINDS for event in spans):
        dropped |= {"forward", "backward"}
    for event in metrics.clip_backward(spans):
        if event.event not in dropped:
            own = event.device in devices
            yield _span(event, base + (devices.index(event.device or "") if own else 0))


def _exposed(recording: Recording, rank: int, step: int, base: int) -> Iterator[Span]:
    """Yield the times when the rank's first device waits. DataParallel's copies count as work."""
    times = metrics.step_intervals(recording, rank, step)
    for start, end in times["exposed_waiting"]:
        yield Span(base, "wait", "waiting for a slower rank", start, end, False, {"step": step})
    for start, end in times["exposed_communication"] if recording.plan.strategy != "dp" else ():
        yield Span(base, "wait", "exposed communication", start, end, True, {"step": step})


def _span(event: SpanEvent, lane: int) -> Span:
    kind = KINDS.get(event.event, event.event)
    numbered = kind if event.micro is None else f"{kind} {event.micro}"
    label = event.unit or (f"bucket {event.bucket}" if kind == "all_reduce" else numbered)
    hidden = ("event", "start", "end", "device")
    details = {name: value for name, value in event.known.items() if name not in hidden}
    return Span(lane, kind, label, event.start, event.end, details=details)


def schedule(recording: Recording) -> Schedule | None:
    """Draw how a typical step passes through replica 0's stages, and the ideal schedule."""
    plan = recording.plan
    name = plan.schedule or "gpipe"
    if plan.stages < 2 or not recording.detailed:
        return None
    step, typical = _typical_step(recording)
    own = metrics.pipelines_of(recording, step)[0]
    passes = [e for e in metrics.clip_backward(own) if e.event in ("forward", "backward")]
    work = [(e, e.stage) for e in passes if not e.accumulation and e.stage is not None]
    if not work:
        return None

    origin = min(event.start for event, _ in work)
    measured = []
    for event, index in work:
        part, stage = divmod(index, plan.stages)
        start, end = (round(time - origin, CLOCK_DIGITS) for time in event.interval)
        what = (event.micro or 0, event.event == "backward")
        measured.append(Slot(stage, *what, start, end, part, bool(event.weights)))
    if plan.schedule:
        first = [rank for rank in plan.ranks if not rank.replica and not rank.shard]
        who = "Replica 0"
        devices = [f"rank {rank.rank} · {rank.devices[0].name}" for rank in first]
    else:
        who, devices = "Rank 0", [device.name for device in plan.ranks[0].devices]
    return Schedule(
        f"{who}, {plural(plan.micro_batches, 'micro-batch')} through {plan.stages} stages",
        tuple(f"stage {stage} · {device}" for stage, device in enumerate(devices)),
        tuple(measured),
        tuple(ideal_slots(plan.stages, plan.micro_batches, name)),
        metrics.pass_bubbles(own, plan.stages)[0],
        ideal_bubble(plan.stages, plan.micro_batches, name),
        f"Step {step} has the bubble closest to the median over all steps, "
        f"{measure(typical, 'share')}. {IDEAL[name]}",
        step,
    )


def _typical_step(recording: Recording) -> tuple[int, float | None]:
    """Return the step whose bubble on the first replica is closest to the median, and the median."""
    bubbles = {}
    for step in recording.detailed:
        pipeline = metrics.pipelines_of(recording, step)[0]
        if shares := metrics.pass_bubbles(pipeline, recording.plan.stages):
            bubbles[step] = shares[0]
    if not bubbles:
        return recording.detailed[-1], None
    middle = statistics.median(bubbles.values())
    return min(bubbles, key=lambda step: abs(bubbles[step] - middle)), middle


IDEAL = {
    "gpipe": "In the ideal schedule (GPipe), all forward and backward passes take the same time.",
    "1f1b": "In the ideal schedule (1F1B), all forward and backward passes take the same time.",
    "interleaved": "In the ideal schedule, all passes take the same time. Each stage has two parts of "
    "the model; a prime marks passes of the second part.",
    "zero-bubble": "In the ideal schedule, forward, input, and weight passes take the same time. A "
    "prime marks the second part of a stage. The model's input does not need a gradient, so the "
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


def load_lines(recordings: Sequence[Recording], title: str = "Load") -> Lines | None:
    """Draw each GPU's load as reported by NVML or, without a GPU, the cores that each rank used."""

    def gpus(rank: int, load: Load) -> Values:
        return {f"{gpu.device} · NVML (rank {rank})": gpu.utilization for gpu in load.devices}

    def cores(rank: int, load: Load) -> Values:
        return {} if load.devices else {f"rank {rank} · cores": load.cpu_share}

    if curves := _curves(recordings, gpus):
        return _lines(title, curves, "seconds", "share of time with a running kernel", "share")
    return _lines(title, _curves(recordings, cores), "seconds", "in use", "cores")


def memory_lines(recordings: Sequence[Recording]) -> Lines | None:
    """Draw the memory allocated on each GPU or, without a GPU, each process's memory."""

    def used(rank: int, load: Load) -> Values:
        gpus = {f"rank {rank} · {gpu.device}": gpu.allocated_bytes for gpu in load.devices}
        return gpus or {f"rank {rank} · process": load.rss_bytes}

    return _lines("Memory", _curves(recordings, used), "seconds", "memory", "bytes")


def _curves(
    recordings: Sequence[Recording], read: Callable[[int, Load], Values]
) -> dict[str, Points]:
    """Read all load samples, with all runs on one time axis. A single sample is not a curve."""
    curves: dict[str, Points] = defaultdict(list)
    offset = 0.0
    for recording in recordings:
        times = [event.time for event in recording.of(Load)]
        offset -= min(times, default=0.0)
        for rank in range(recording.world_size):
            for event in recording.of(Load, rank):
                for name, value in read(rank, event).items():
                    if value is not None:
                        curves[name].append((offset + event.time, value))
        offset += max(times, default=0.0) + GAP_SECONDS
    return {name: points for name, points in curves.items() if len(points) > 1}


def loss_lines(rows: Sequence[Row]) -> Lines | None:
    """Draw the losses of all configurations. Identical curves overlap."""
    curves = {
        row.name: [(float(step), loss) for step, loss in enumerate(row.losses) if loss is not None]
        for row in rows
    }
    return _lines("Loss", curves, "optimizer step", "global batch loss", "number")


def _lines(title: str, curves: Mapping[str, Points], x: str, y: str, unit: str) -> Lines | None:
    """Draw each curve with at most `MOST_POINTS` points, evenly spaced."""
    lines = []
    for name, points in curves.items():
        step = -(-len(points) // MOST_POINTS)
        lines += [Line(name, tuple(sorted(points)[::step]))] if points else []
    return Lines(title, tuple(lines), x, y, unit) if lines else None


def split(batch: Batch, ranks: Sequence[Rank]) -> Split:
    """Draw the batch split over devices, divided into passes and micro-batches."""
    parts = []
    # All stages and shards in a replica process the same samples.
    for rank in (rank for rank in ranks if not rank.stage and not rank.shard):
        if rank.roles[0].startswith("replica "):  # DataParallel: one process, one share per replica
            for device, samples in zip(rank.devices, rank.split, strict=True):
                parts.append(Part(device, even_sizes(samples, batch.accumulate)))
        else:
            passes = pieces(rank.samples_per_step, batch.accumulate, batch.micro_batches)
            sizes = tuple(stop - start for spans in passes for start, stop in spans)
            parts.append(Part(f"rank {rank.rank} · {' → '.join(rank.devices)}", sizes))
    return Split(batch.arithmetic, batch.size, tuple(parts))
