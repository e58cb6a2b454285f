"""W05: Pipeline stages of unequal length."""

from __future__ import annotations

from collections.abc import Sequence

from paralab.doctor.finding import Finding
from paralab.doctor.recorded import Recorded
from paralab.doctor.registry import Entry, Findings, check
from paralab.units import seconds

ENTRY = Entry(
    id="W05",
    title="Pipeline stages of unequal length",
    symptom="The stages of a pipeline idle more than the schedule requires.",
    cause="In every slot all stages wait for the longest one. Stages with the same number of layers can have different amounts of work.",
    fix="Cut by time, not by the number of layers: `paralab plan` shows the time of each stage.",
    example="""\
- stages = [layers[:6], layers[6:]]  # the last one has the large output layer as well
+ stages = [layers[:8], layers[8:]]
""",
)
UNEVEN = 0.10  # share of the stages' time, beyond the cost of the schedule


def judge_stages(measured: float, ideal: float, busy: Sequence[float]) -> Finding | None:
    """Report unequal stages. `measured`, `ideal`: the idle share; `busy`: seconds of each stage."""
    if measured - ideal < UNEVEN:
        return None
    why = f"The stages idle {measured:.0%} of the time, but with these micro-batches {ideal:.0%} is possible."
    if busy:
        longest = max(range(len(busy)), key=lambda stage: busy[stage])
        why += (
            f" Stage {longest} computes longest, {seconds(busy[longest])}; the shortest takes "
            f"{seconds(min(busy))}."
        )
    return Finding("W05", "warning", why, ENTRY.fix, gain=measured - ideal)


@check("W05", source="run")
def uneven_stages(recorded: Recorded) -> Findings:
    for run in recorded.runs:
        # Stages that share cores wait for the cores, which L09 reports.
        if (bubble := run.metrics.bubble) and not run.is_crowded:
            busy = [device.seconds or 0.0 for device in run.metrics.busy][: run.plan.stages]
            yield from run.report(judge_stages(bubble.measured, bubble.ideal, busy))
