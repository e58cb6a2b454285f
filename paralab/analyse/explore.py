"""Set the figures' sliders to the values that this comparison measured.

A section omits a figure whose values were not measured, and says why.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

from paralab.analyse import figures
from paralab.analyse.blocks import Control, Explorable, Section
from paralab.analyse.compare import Comparison, Row
from paralab.analyse.recording import Recording
from paralab.plan.overlap import fit_link
from paralab.plan.schedules import SCHEDULES
from paralab.units import plural

MOST_DEVICES = 16
MOST_LATENCY = 95  # percent of a measured transfer that is latency
BUCKET_PARTS = 64  # a slider step is the size of all gradients divided by this
PREDICTED_DEVICES = 8  # devices in the first prediction
# The memory formula holds only for these option values.
PLAIN = {"zero": (None, 3), "shard_groups": (None, 1), "schedule": (None,), "recompute": (None,)}

WHOLE_MODEL = ("single", "ddp", "pipeline")  # their measurements give a whole model's memory
GROWTH = {
    "ddp": "2·(n − 1) / n, as in a ring",
    "dp": "n − 1, because device 0 exchanges the model and the gradients with every other device",
}


class NotMeasured(Exception):
    """This comparison did not measure a figure's initial values."""


def section(comparison: Comparison) -> Section:
    folder = Path(comparison.run_folder)
    drawn, missing = [], []
    for name, make in FIGURES.items():
        try:
            drawn.append(make(comparison.rows, folder))
        except NotMeasured as error:
            missing.append(f"{name}: {error}")
    text = "Each figure starts at this run's values. Move a slider to try other values."
    if missing:
        text += f" Left out: {'; '.join(missing)}."
    return Section("Explore", tuple(drawn), text)


def _first(rows: list[Row], strategy: str, why_not: str) -> Row:
    """Return the first fp32 row with this strategy and the fewest accumulation steps."""
    candidates = [row for row in rows if row.strategy == strategy and row.precision == "fp32"]
    if not candidates:
        raise NotMeasured(why_not)
    return min(candidates, key=lambda row: row.accumulate)


def _schedule(rows: list[Row], folder: Path) -> Explorable:
    """Start with the first measured pipeline."""
    for row in rows:
        recording = Recording.read(folder / row.runs[-1])
        if chart := figures.schedule(recording):
            break
    else:
        raise NotMeasured("no pipeline ran")
    plan = recording.plan
    passes = [[s.stage, s.micro, s.kind, s.start, s.end] for s in chart.measured]
    totals = {
        f"{name}_seconds": sum(s.end - s.start for s in chart.measured if s.backward == backward)
        for name, backward in (("forward", False), ("backward", True))
    }
    return Explorable(
        "Pipeline schedule",
        "schedule",
        (
            Control("stages", "Stages", plan.stages, 2, 8),
            Control("micro_batches", "Micro-batches", plan.micro_batches, 1, 16),
            Control("schedule", "Schedule", plan.schedule or "gpipe", choices=SCHEDULES),
        ),
        {**totals, "measured": passes},
        "bubble = (s − 1) / (k·m + s − 1), with s stages, m micro-batches, and k = 1 for gpipe and "
        "1f1b, 2 for interleaved (two parts per stage), 6 for zero-bubble (three passes per part)",
        f"Measured: step {chart.step} of {row.name}. Ideal: the same total forward and backward "
        "time, divided equally over stages and micro-batches; sending takes no time. Each row is a "
        "stage.",
    )


def _overlap(rows: list[Row], folder: Path) -> Explorable:
    row = _first(rows, "ddp", "no ddp configuration ran in fp32")
    buckets = [each for each in row.metrics.buckets if each.transfer_seconds > 0]
    backward = row.metrics.backward_seconds
    if not buckets or not backward:
        raise NotMeasured("no step was recorded in detail")
    link = fit_link([b.bytes for b in buckets], [b.transfer_seconds for b in buckets])
    total = sum(bucket.bytes for bucket in buckets)
    start = round(BUCKET_PARTS * max(bucket.bytes for bucket in buckets) / total)
    # The mean transfer time stays as measured; the slider divides it into latency and bandwidth.
    size, time = total / len(buckets), sum(b.transfer_seconds for b in buckets) / len(buckets)
    latency = min(MOST_LATENCY, round(100 * link.latency_seconds / time))
    fitted = f"assumed: {link.assumed}" if link.assumed else f"fitted to {len(buckets)} buckets"
    return Explorable(
        "Bucket size and overlap",
        "overlap",
        (
            Control("bucket", "Bucket size", max(1, start), 1, BUCKET_PARTS),
            Control("latency", "Latency", latency, 0, MOST_LATENCY),
            Control("speed", "Link speed", 0, -4, 4),
        ),
        {
            "backward_seconds": backward,
            "gradient_bytes": total,
            "transfer_bytes": size,
            "transfer_seconds": time,
            "parts": BUCKET_PARTS,
            "exposed_seconds": row.metrics.exposed_communication_seconds,
        },
        "transfer = latency + bytes / bandwidth; a bucket starts when it is ready and the link is "
        "free; exposed = end of the last transfer − end of the backward pass",
        f"Measured: {row.name}. Latency and bandwidth {fitted}. Gradients become ready evenly over "
        "the backward pass, and all buckets but the last have the same size.",
    )


def _memory(rows: list[Row], folder: Path) -> Explorable:
    """Start with a single device's memory. If it is unknown, start with a ddp rank's, or with the
    sum of the stages of a pipeline that keeps all activations until the backward pass."""
    whole = [row for row in rows if row.strategy != "pipeline" or not row.request.schedule]
    ran = {row.strategy for row in whole}
    strategy = next((name for name in WHOLE_MODEL if name in ran), WHOLE_MODEL[-1])
    row = _first(whole, strategy, f"none of {', '.join(WHOLE_MODEL)} ran")
    devices = list(row.peak_bytes)
    if strategy != "pipeline":
        devices = sorted(devices, key=lambda memory: memory.bytes)[-1:]
    if not devices or any(memory.parameters is None for memory in devices):
        raise NotMeasured("memory was not measured")
    names = ("parameters", "gradients", "optimizer")
    parts = {name: sum(memory[name] or 0 for memory in devices) for name in names}
    counted = [memory.activations for memory in devices if memory.activations is not None]
    activations, how = sum(counted), "counted"
    if len(counted) < len(devices):  # CUDA's allocator does not list them
        activations = sum(memory.bytes for memory in devices) - sum(parts.values())
        how = "the allocator's peak minus everything else"
    samples = max(rank.samples_per_step for rank in row.ranks) / row.accumulate
    return Explorable(
        "Memory per device",
        "memory",
        (
            Control("devices", "Devices", _usual_devices(rows), 1, MOST_DEVICES),
            Control("batch", "Batch size", row.batch.size, 1, 4 * row.batch.size),
            Control("precision", "Precision", "fp32", choices=("fp32", "bf16")),
        ),
        {
            **parts,
            "activations_per_sample": activations / samples,
            "measured": _measured_memory(rows, row.batch.size),
            "measured_batch": row.batch.size,
        },
        "ddp = parameters + gradients + optimizer + activations · ceil(batch / devices); fsdp and "
        "pipeline divide the first three by the number of devices",
        f"Computed from {row.name}, whose activations are {how}. Assumed: bf16 (autocast) halves "
        "activations, stages are equal, and fsdp's temporarily gathered layers are not included.",
    )


def _usual_devices(rows: list[Row]) -> int:
    """Return the most common number of devices, ignoring configurations with one device."""
    several = [row.devices for row in rows if 1 < row.devices <= MOST_DEVICES]
    return statistics.mode(several) if several else 1


def _measured_memory(rows: list[Row], batch_size: int) -> list[tuple[str, int, str, int]]:
    """Return the strategy, devices, precision, and peak bytes of each plain configuration."""
    plain = [
        row
        for row in rows
        if row.accumulate == 1
        and row.batch.size == batch_size
        and all(getattr(row.request, name) in usual for name, usual in PLAIN.items())
    ]
    peaks = [(row, max((memory.bytes for memory in row.peak_bytes), default=0)) for row in plain]
    return [(row.strategy, row.devices, row.precision, peak) for row, peak in peaks if peak]


def _split(rows: list[Row], folder: Path) -> Explorable:
    row = max(rows, key=lambda row: (row.devices > 1, row.accumulate))
    replicas = len({rank.replica for rank in row.ranks}) if row.strategy != "dp" else row.devices
    return Explorable(
        "Batch split",
        "split",
        (
            Control("batch", "Batch size", row.batch.size, 1, max(128, 2 * row.batch.size)),
            Control("devices", "Devices", replicas, 1, MOST_DEVICES // 2),
            Control("accumulate", "Accumulation steps", row.accumulate, 1, 8),
        ),
        {},
        "share = ceil(batch / devices) until no samples are left, like torch.chunk: 64 over 3 "
        "devices is 22/22/20",
        f"Measured: {row.name}. Each box is one forward and backward pass.",
    )


def _what_if(rows: list[Row], folder: Path) -> Explorable:
    """Predict from ddp or, if it did not run, from dp. Compute time is a single device's or, if
    `single` did not run, that of all ddp ranks."""
    strategy = "ddp" if any(row.strategy == "ddp" for row in rows) else "dp"
    several = [row for row in rows if row.devices > 1]
    many = _first(several, strategy, "neither ddp nor dp ran in fp32 on several devices")
    if strategy == "ddp" and all(row.strategy != "single" for row in rows):
        one, share = many, many.devices
        source = f"{share} × that of a rank of {many.name}"
    else:
        one, share = _first(rows, "single", "single did not run in fp32"), 1
        source = f"from {one.name}"
    compute, moved = one.metrics.compute_seconds, many.metrics.communication_seconds
    if not compute or moved is None or many.batch.size != one.batch.size:
        why = f"no step was recorded in detail for single and {strategy} with the same batch"
        raise NotMeasured(why)
    same = [
        row
        for row in reversed(rows)  # use the first configuration with this many devices
        if (row.strategy, row.precision, row.accumulate, row.batch.size)
        == (strategy, "fp32", many.accumulate, many.batch.size)
    ]
    return Explorable(
        "What if there were more devices? A prediction",
        "what_if",
        (Control("devices", "Devices", PREDICTED_DEVICES, 1, 64),),
        {
            "compute_seconds": compute * share,
            "optimizer_seconds": one.metrics.optimizer_seconds or 0.0,
            "other_seconds": one.metrics.other_seconds or 0.0,
            "communication_seconds": moved,
            "measured_devices": many.devices,
            "overlap": many.metrics.overlap or 0.0,
            "strategy": strategy,
            "measured_seconds": {
                str(row.devices): row.step_seconds.median for row in (*same, many, one)
            },
        },
        "step(n) = compute / n + optimizer + other + (1 − overlap) · communication(n), and "
        f"communication(n) grows like {GROWTH[strategy]}",
        f"A prediction, not a measurement. Compute time is {source}, communication time from "
        f"{many.name} ({plural(many.devices, 'device')}). Assumed: every device has its own cores or "
        "GPU, compute divides perfectly, ranks never wait, and the link stays as fast. Each bar is a "
        "number of devices.",
    )


FIGURES: dict[str, Callable[[list[Row], Path], Explorable]] = {
    "pipeline schedule": _schedule,
    "bucket size": _overlap,
    "memory": _memory,
    "batch split": _split,
    "more devices": _what_if,
}
