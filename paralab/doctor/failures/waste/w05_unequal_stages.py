"""W05: Pipeline stages of unequal length.

Symptom: The stages of a pipeline idle more than the schedule requires.
Cause: In every slot, all stages wait for the slowest one. Stages with the same number of layers can
have different amounts of work.
Fix: Cut by time, not by the number of layers: `paralab plan` shows the time of each stage.

- stages = [layers[:6], layers[6:]]  # the last one has the large output layer as well
+ stages = [layers[:8], layers[8:]]
"""

from collections.abc import Sequence

from paralab.doctor.recorded import Run, check_each_run
from paralab.doctor.registry import Finding, describe
from paralab.units import seconds

ENTRY = describe(__doc__)
UNEVEN = 0.10  # share of the time that stages idle beyond what the schedule requires


def judge_stages(measured: float, ideal: float, busy: Sequence[float]) -> Finding | None:
    """Report unequal stages, given the measured and the ideal idle share and each stage's busy
    seconds."""
    if measured - ideal < UNEVEN:
        return None
    why = f"The stages idle {measured:.0%} of the time, but with these micro-batches {ideal:.0%} is possible."
    if busy:
        longest = max(range(len(busy)), key=lambda stage: busy[stage])
        why += (
            f" Stage {longest} computes the longest, {seconds(busy[longest])}; the shortest takes "
            f"{seconds(min(busy))}."
        )
    return Finding("W05", "warning", why, gain=measured - ideal)


@check_each_run("W05")
def uneven_stages(run: Run) -> Finding | None:
    bubble = run.metrics.bubble
    if bubble is None or run.is_crowded:  # stages that share cores wait for the cores (L09)
        return None
    busy = [device.seconds or 0.0 for device in run.metrics.busy][: run.plan.stages]
    return judge_stages(bubble.measured, bubble.ideal, busy)
