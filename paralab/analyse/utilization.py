"""Measure how busy the machine was: load, model FLOP/s, and the first step's gradients."""

import math
import statistics
from collections import defaultdict

from paralab.analyse.metric_types import Flops, GpuLoad, GradientCounts, MeanLoad
from paralab.analyse.recording import Recording, bounds, count_samples, mean
from paralab.machine.peaks import PEAKS
from paralab.record.events import Gradients, Load


def mean_load(recording: Recording) -> MeanLoad:
    begin, end = bounds(recording.timed) if recording.timed else (math.inf, 0.0)
    ranks = [
        [event for event in recording.of(Load, rank) if begin <= event.time <= end + 0.3]
        for rank in range(recording.world_size)
    ]
    gpus: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for device in (device for own in ranks for event in own for device in event.devices):
        if device.utilization is not None:
            gpus[device.device].append((device.utilization, device.used_bytes or 0))

    reasons = {event.not_measured for event in recording.of(Load) if event.not_measured}
    if not any(ranks):
        reasons.add("the run was too short: load is sampled every 0.1 s")
    return MeanLoad(
        cores_per_rank=[mean([event.cpu_share for event in own]) for own in ranks],
        waiting_per_rank=[
            mean([e.waiting_threads for e in own if e.waiting_threads is not None]) for own in ranks
        ],
        gpu=[
            GpuLoad(
                device=device,
                utilization=statistics.mean(utilization for utilization, _ in samples),
                used_bytes=max(used for _, used in samples),
            )
            for device, samples in sorted(gpus.items())
        ],
        not_measured="; ".join(sorted(reasons)) or None,
    )


def model_flops(recording: Recording, step_seconds: float | None) -> Flops:
    """Divide the FLOPs that the model needs by the step time. Recomputed FLOPs do not count."""
    plan, machine = recording.plan, recording.manifest.machine
    per_sample = recording.manifest.workload.flops_per_sample
    if not per_sample or not step_seconds:
        why = "the model has recurrent layers or no matrix products"
        why = "no step was measured" if per_sample else f"FLOPs were not counted: {why}"
        return Flops(per_second=None, share_of_peak=None, not_measured=why)
    # A step trains on fewer samples than the batch size if an epoch is smaller than a batch.
    samples = count_samples(recording.full[0])
    per_second = per_sample * samples / step_seconds
    devices = {device.torch for rank in plan.ranks for device in rank.devices}
    name = machine.gpus[0].name if plan.device == "cuda" else machine.cpu
    per_device = PEAKS[name].of(plan.precision) if name in PEAKS else None
    if not per_device:
        why = f"the {plan.precision} peak of {name!r} is unknown"
        return Flops(per_second=per_second, share_of_peak=None, not_measured=why)
    peak = per_device * len(devices)
    return Flops(
        per_second=per_second,
        share_of_peak=per_second / peak,
        not_measured=None,
        peak_per_second=peak,
        source=PEAKS[name].source,
    )


def count_gradients(recording: Recording) -> GradientCounts | None:
    ranks = [r.rank for r in recording.plan.ranks if not r.replica and not r.shard]
    events = [event for rank in ranks for event in recording.of(Gradients, rank)]
    counts = {
        name: sum(event[name] for event in events) for name in ("total", "zeros", "not_finite")
    }
    return GradientCounts(**counts, scale=events[0].scale) if events else None
