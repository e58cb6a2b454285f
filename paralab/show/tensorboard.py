"""Export a finished run to TensorBoard: its numbers per step and over time, read from the run
folder.

Each run gets a subfolder with the name of its run folder, so that runs appear side by side. Each
point has the wall time of its measurement. paralab writes TensorBoard's record format directly,
because TensorBoard's EventFileWriter imports TensorFlow if it is installed.
"""

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paralab.analyse.recording import Recording, bounds
from paralab.analyse.time_intervals import length
from paralab.errors import UsageError
from paralab.record.events import COLLECTIVES, Event, Load, Memory, Span, Start, Step


class Point(NamedTuple):
    tag: str
    step: int
    seconds: float  # seconds since launch, as in the events
    value: float


def require_tensorboard() -> None:
    """Check for tensorboard before the run starts, not when it ends."""
    if importlib.util.find_spec("tensorboard") is None:
        problem = "--tensorboard needs the tensorboard package, which is not installed."
        raise UsageError(problem, fix='pip install "paralab[tensorboard]"')


def write_tensorboard(folder: Path, directory: Path) -> Path:
    """Write the run in `folder` to a new subfolder of `directory`, and return the subfolder."""
    from tensorboard.compat.proto.event_pb2 import Event as Record
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.summary.writer.record_writer import RecordWriter

    recording = Recording.read(folder)
    # The time at which the event clock was zero. If no rank started, there are no events either.
    launched = next((event.unix_seconds - event.time for event in recording.of(Start)), 0.0)

    def record(step: int, seconds: float, **value: Any) -> Record:
        summary = Summary(value=[Summary.Value(**value)])
        return Record(wall_time=launched + seconds, step=step, summary=summary)

    plan, workload = recording.plan, recording.manifest.workload.name
    sentence = f"**{plan.strategy}** trains **{workload}** in {plan.precision}: {plan.arithmetic}"
    text = TensorProto(dtype=DT_STRING, string_val=[sentence.encode()])
    as_text = SummaryMetadata(plugin_data={"plugin_name": "text"})
    records = [
        Record(wall_time=launched, file_version="brain.Event:2"),
        record(0, 0.0, tag="plan", tensor=text, metadata=as_text),
    ]
    points = sorted(points_of(recording), key=lambda point: (point.seconds, point.step))
    records += [record(p.step, p.seconds, tag=p.tag, simple_value=p.value) for p in points]

    target = _new_folder(directory, folder.resolve().name)
    with (target / f"events.out.tfevents.{launched:.0f}.paralab").open("xb") as file:
        writer = RecordWriter(file)
        for each in records:
            writer.write(each.SerializeToString())
    return target


def points_of(recording: Recording) -> Iterator[Point]:
    """Yield each number with its step and its time."""
    previous_end = None
    for number, (step, loss) in enumerate(zip(recording.steps, recording.losses, strict=True)):
        start, end = bounds([step])
        if math.isfinite(loss):
            yield Point("train/loss", number, end, loss)
        yield Point("train/step_seconds", number, end, end - start)

        # Measure from the end of the previous step to include data loading.
        elapsed = end - (start if previous_end is None else previous_end)
        if elapsed > 0:
            samples = sum(event.samples for event in step)
            yield Point("train/samples_per_second", number, end, samples / elapsed)
        previous_end = end
    for rank, own in recording.events.items():
        yield from _per_detailed_step(rank, own)
        yield from _over_time(rank, own)


def _per_detailed_step(rank: int, events: list[Event]) -> Iterator[Point]:
    """Yield the loss scale (rank 0) and the communication time of steps with details."""
    under_way: list[tuple[float, float]] = []
    for event in events:
        if not isinstance(event, Span):
            continue
        if event.event in COLLECTIVES:
            under_way.append(event.interval)
        elif event.event == "optimizer" and rank == 0 and event.scale is not None:
            yield Point("train/loss_scale", event.step, event.end, event.scale)
        elif event.event == "step" and under_way:
            tag = f"communication_seconds/rank_{rank}"
            yield Point(tag, event.step, event.end, length(under_way))
            under_way = []


def _over_time(rank: int, events: list[Event]) -> Iterator[Point]:
    """Yield memory and load. Each point is placed at the latest step that the rank had finished."""
    step = 0
    for event in events:
        if isinstance(event, Step):
            step = event.step
        elif isinstance(event, Memory):
            yield Point(f"peak_bytes/rank_{rank}_{event.device}", step, event.time, event.bytes)
        elif isinstance(event, Load):
            numbers: dict[str, float | None] = {
                f"load/rank_{rank}_cpu_cores": event.cpu_share,
                f"memory_bytes/rank_{rank}": event.rss_bytes,
            }
            for device in event.devices:
                numbers[f"load/rank_{rank}_{device.device}"] = device.utilization
                numbers[f"memory_bytes/rank_{rank}_{device.device}"] = device.allocated_bytes
            for tag, value in numbers.items():
                if value is not None:
                    yield Point(tag, step, event.time, value)


def _new_folder(directory: Path, name: str) -> Path:
    """Create a folder with a new name. TensorBoard draws runs with the same name as one line."""
    target, number = directory / name, 2
    while target.exists():
        target, number = directory / f"{name}_{number}", number + 1
    target.mkdir(parents=True)
    return target
