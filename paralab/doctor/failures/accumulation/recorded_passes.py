"""G02 and P06 in recorded runs: gradients are synchronized more than once per step."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.recorded import Recorded
from paralab.doctor.registry import check
from paralab.units import plural, seconds


@check("G02", "P06", source="run")
def synced_every_pass(recorded: Recorded) -> Iterator[Finding]:
    for run in recorded.runs:
        finding = judge_synchronizations(
            run.result.all_reduces_per_step or 0.0,
            len(run.last_buckets),
            run.plan.accumulate,
            run.metrics.exposed_communication_seconds or 0.0,
            run.step_seconds,
            run.plan.stages,
        )
        yield from run.report(finding)


def judge_synchronizations(
    all_reduces: float, buckets: int, passes: int, exposed: float, step: float, stages: int = 1
) -> Finding | None:
    """Report more all-reduces per step than buckets: gradients are sent before they are final."""
    if passes < 2 or not buckets or all_reduces < 2 * buckets or not step:
        return None
    times = all_reduces / buckets
    why = (
        f"{all_reduces:g} all-reduces per optimizer step for {plural(buckets, 'bucket')}: the gradients "
        f"are synchronized {times:g} times in {passes} backward passes. Once is enough. "
        f"{seconds(exposed)} per step ({exposed / step:.0%}) is exposed."
    )
    fix = (
        "Use `with model.no_sync():` around forward and backward of all passes but the last "
        "(paralab: without --sync-every-pass)."
    )
    evidence = (
        f"{all_reduces:g} all-reduces per step, {plural(buckets, 'bucket')}, {passes} passes",
    )
    gain = exposed * (1 - 1 / times) / step
    id = "P06" if stages > 1 else "G02"
    return Finding(id, "warning", why, fix, evidence=evidence, gain=gain)
