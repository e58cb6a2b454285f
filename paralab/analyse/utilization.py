"""Measure how busy the machine was: core and GPU load, model FLOP/s, and the first step's
gradients."""

from __future__ import annotations

import statistics

from paralab.analyse.metric_types import Flops, GpuLoad, GradientCounts, MeanLoad
from paralab.analyse.recording import Recording
from paralab.machine.peaks import PEAKS
from paralab.record.events import Gradients, Load


def mean_load(recording: Recording) -> MeanLoad:
    cpu: dict[int, float] = {}
    gpu: dict[str, list[float]] = {}
    memory: dict[str, list[int]] = {}
    reasons = {event.not_measured for event in recording.of(Load) if event.not_measured}
    for rank in range(recording.world_size):
        samples = [e for e in recording.of(Load, rank) if _while_training(recording, e.time)]
        if samples:
            cpu[rank] = statistics.mean(event.cpu_share for event in samples)
        for device in (device for event in samples for device in event.devices):
            if device.utilization is not None:
                gpu.setdefault(device.device, []).append(device.utilization)
                memory.setdefault(device.device, []).append(device.used_bytes or 0)
    if not cpu:
        reasons.add("the run was too short: load is sampled every 0.1 s")
    return MeanLoad(
        cores_per_rank=[cpu.get(rank) for rank in range(recording.world_size)],
        gpu=[
            GpuLoad(
                device=device, utilization=statistics.mean(values), used_bytes=max(memory[device])
            )
            for device, values in sorted(gpu.items())
        ],
        not_measured="; ".join(sorted(reasons)) or None,
    )


def _while_training(recording: Recording, moment: float) -> bool:
    timed = recording.timed
    return (
        bool(timed)
        and min(e.start for e in timed[0]) <= moment <= max(e.end for e in timed[-1]) + 0.3
    )


def model_flops(recording: Recording, step_seconds: float | None) -> Flops:
    """Divide the FLOPs that the model needs (not those computed) by the step time."""
    plan, machine = recording.plan, recording.manifest.machine
    per_sample = recording.manifest.workload.flops_per_sample
    if not per_sample or not step_seconds:
        why = "FLOPs were not counted: the model has recurrent layers or no matrix products"
        if per_sample:
            why = "no step was measured"
        return Flops(per_second=None, share_of_peak=None, not_measured=why)
    # A step trains on fewer samples than the batch size if an epoch is smaller than a batch.
    samples = statistics.median(sum(event.samples for event in step) for step in recording.timed)
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
    ranks = [r.rank for r in recording.plan.ranks if r.rank == 0 or (r.stage and not r.replica)]
    events = [event for rank in ranks for event in recording.of(Gradients, rank)]
    if not events:
        return None
    return GradientCounts(
        total=sum(event.total for event in events),
        zeros=sum(event.zeros for event in events),
        not_finite=sum(event.not_finite for event in events),
        scale=events[0].scale,
    )
