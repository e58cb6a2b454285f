"""What the synchronization of a recorded run costs: too much of it, in one piece, too often, or
waiting for one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paralab.analyse.metric_types import Bucket
from paralab.analyse.phrases import collectives_per_step
from paralab.doctor import waste
from paralab.doctor.finding import Finding
from paralab.doctor.recorded import Recorded, Run
from paralab.doctor.registry import check
from paralab.units import size


def placed(run: Run, *findings: Finding | None) -> Iterator[Finding]:
    """What was found, with the folder of its run."""
    yield from (replace(finding, file=str(run.folder)) for finding in findings if finding)


@check("W01", source="run")
def over_a_tenth(recorded: Recorded) -> Iterator[Finding]:
    for run in recorded.runs:
        if run.plan.strategy == "dp":
            how = "nn.DataParallel copies the model and gathers outputs and gradients in every step"
        else:
            how = f"{collectives_per_step(run.result)}, {size(run.result.bytes_per_step)} in total, per step and rank"
        spent, exposed = (
            run.metrics.communication_seconds,
            run.metrics.exposed_communication_seconds,
        )
        yield from placed(
            run, waste.over_a_tenth(spent or 0.0, exposed or 0.0, run.step_seconds, how)
        )


@check("W02", source="run")
def one_bucket(recorded: Recorded) -> Iterator[Finding]:
    for run in recorded.runs:
        last = _last_pass(run)
        if run.plan.strategy != "ddp" or not last:
            continue
        transfer = sum(bucket.transfer_seconds for bucket in last)
        metrics = run.metrics
        # Of one pass: with accumulation only the last backward pass has buckets to overlap with.
        backward = (metrics.backward_seconds or 0.0) / run.plan.accumulate
        exposed = min(metrics.exposed_communication_seconds or 0.0, transfer)
        sizes = [bucket.bytes for bucket in last]
        yield from placed(
            run, waste.one_bucket(sizes, backward, transfer, exposed, run.step_seconds)
        )


def _last_pass(run: Run) -> list[Bucket]:
    """The buckets of one synchronization: those of the last backward pass."""
    buckets = [bucket for bucket in run.metrics.buckets if bucket.kind == "all_reduce"]
    return list({(bucket.stage, bucket.bucket): bucket for bucket in buckets}.values())


@check("G02", source="run")
def synced_every_pass(recorded: Recorded) -> Iterator[Finding]:
    yield from (finding for finding in _synced_too_often(recorded) if finding.id == "G02")


@check("P06", source="run")
def stages_synced_every_pass(recorded: Recorded) -> Iterator[Finding]:
    yield from (finding for finding in _synced_too_often(recorded) if finding.id == "P06")


def _synced_too_often(recorded: Recorded) -> Iterator[Finding]:
    for run in recorded.runs:
        all_reduces, exposed = (
            run.result.all_reduces_per_step or 0.0,
            run.metrics.exposed_communication_seconds or 0.0,
        )
        yield from placed(
            run,
            waste.synced_every_pass(
                all_reduces,
                len(_last_pass(run)),
                run.plan.accumulate,
                exposed,
                run.step_seconds,
                run.plan.stages,
            ),
        )


@check("W03", source="run")
def straggler(recorded: Recorded) -> Iterator[Finding]:
    for run in recorded.runs:
        # Ranks that share cores come last by turns of the system's choice: that is L09.
        if (late := run.metrics.straggler) and not run.is_crowded:
            yield from placed(
                run,
                waste.straggler(
                    late.rank,
                    late.waited_seconds,
                    run.step_seconds,
                    late.last_in,
                    late.of,
                ),
            )
