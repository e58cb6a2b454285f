"""Where the devices of a recorded run had nothing to do, or too much: data, stages, replicas,
cores, precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paralab.analyse.compare import Row
from paralab.analyse.confidence import speed_up
from paralab.doctor import waste
from paralab.doctor.finding import Finding
from paralab.doctor.recorded import Recorded
from paralab.doctor.registry import check
from paralab.doctor.run_rules.communication import placed
from paralab.plan.request import Request

LOW = ("bf16", "fp16")


@check("T06", source="run")
def data_wait(recorded: Recorded) -> Iterator[Finding]:
    for run in recorded.runs:
        # Between steps lies more than loading (a checkpoint, the notice board): no more than the
        # loading is blamed on the data.
        waited = min(run.metrics.data_wait_seconds or 0.0, run.metrics.data_seconds or 0.0)
        yield from placed(run, waste.data_wait(waited, run.step_seconds))


@check("D02", source="run")
def unequal_replicas(recorded: Recorded) -> Iterator[Finding]:
    for run in recorded.runs:
        if run.plan.strategy == "dp":
            busy = (
                [device.seconds or 0.0 for device in run.metrics.busy]
                if run.metrics.balance
                else []
            )
            held = [memory.bytes for memory in run.result.peak_bytes]
            yield from placed(
                run,
                waste.unequal_replicas(busy, held, run.step_seconds)
                if len(held) > 1 or len(busy) > 1
                else None,
            )


@check("L09", source="run")
def crowded(recorded: Recorded) -> Iterator[Finding]:
    for run in recorded.runs:
        plan = run.plan
        nodes = len({rank.node for rank in plan.ranks}) or 1
        at_once = -(-len(run.result.grid.devices) // nodes)
        # Model parallelism without micro-batches has one device at work at a time.
        if plan.device == "cpu" and plan.strategy != "mp":
            cores = run.recording.manifest.machine.cores
            yield from placed(run, waste.crowded(plan.threads_per_device, at_once, cores, "device"))


@check("S04", source="run")
def needless_search(recorded: Recorded) -> Iterator[Finding]:
    for run in recorded.runs:
        if run.plan.find_unused and not run.recording.manifest.workload.unused:
            yield from placed(run, waste.needless_search())


@check("P05", source="run")
def idle_stages(recorded: Recorded) -> Iterator[Finding]:
    for run in recorded.runs:
        if (bubble := run.metrics.bubble) and not run.is_crowded:
            plan = run.plan
            samples = plan.batch_size // (plan.replicas * plan.accumulate)
            schedule = plan.schedule or "gpipe"
            yield from placed(
                run,
                waste.idle_stages(
                    bubble.measured, plan.stages, plan.micro_batches, schedule, samples
                ),
            )


@check("W05", source="run")
def uneven_stages(recorded: Recorded) -> Iterator[Finding]:
    for run in recorded.runs:
        # With cores shared by the stages, they wait for the cores: that is L09.
        if (bubble := run.metrics.bubble) and not run.is_crowded:
            busy = [device.seconds or 0.0 for device in run.metrics.busy][: run.plan.stages]
            yield from placed(run, waste.uneven_stages(bubble.measured, bubble.ideal, busy))


@check("W04", source="run")
def slower_precision(recorded: Recorded) -> Iterator[Finding]:
    """Only a comparison has the same training in both precisions."""
    for row in recorded.rows:
        if row.precision in LOW and (plain := _in_fp32(row, recorded.rows)):
            ratio = speed_up(plain.round_seconds_per_sample, row.round_seconds_per_sample)
            run = next(run for run in recorded.runs if run.name == row.name)
            machine = run.recording.manifest.machine
            device = machine.gpus[0].name if run.plan.device == "cuda" else machine.cpu
            yield from placed(run, waste.slower_precision(row.precision, ratio, device))


def _in_fp32(row: Row, rows: tuple[Row, ...]) -> Row | None:
    """The same set-up in fp32."""

    same = (
        other
        for other in rows
        if other.precision == "fp32" and _without_precision(other) == _without_precision(row)
    )
    return next(same, None)


def _without_precision(row: Row) -> Request:
    return replace(row.request, precision=None, loss_scale=None)


@check("A08", source="run")
def skipped_for_ever(recorded: Recorded) -> Iterator[Finding]:
    yield from (finding for finding in _lost_losses(recorded) if finding.id == "A08")


@check("W06", source="run")
def not_finite(recorded: Recorded) -> Iterator[Finding]:
    yield from (finding for finding in _lost_losses(recorded) if finding.id == "W06")


def _lost_losses(recorded: Recorded) -> Iterator[Finding]:
    for run in recorded.runs:
        scales = [
            event.scale for event in run.recording.named("optimizer", 0) if event.scale is not None
        ]
        yield from placed(run, waste.lost_loss(run.result.losses, scales, run.result.begun_at_step))
