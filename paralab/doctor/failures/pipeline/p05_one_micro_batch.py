"""P05: A pipeline with one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.recorded import Recorded
from paralab.doctor.registry import Entry, check
from paralab.plan.schedules import ideal_bubble
from paralab.units import plural

ENTRY = Entry(
    id="P05",
    title="A pipeline with one micro-batch",
    symptom="No message. One stage works at a time: with S stages, (S−1)/S of the devices' time is idle.",
    cause="Nothing can overlap if the batch flows through in one piece.",
    fix="At least four micro-batches per stage.",
    wrong="""\
schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=loss_fn)
""",
    right="""\
schedule = ScheduleGPipe(stage, n_microbatches=4 * stage.num_stages, loss_fn=loss_fn)
""",
    silent=True,
)
IDLE = 0.15  # of the stages' time: less is the price of a pipeline
ENOUGH = 4  # micro-batches per stage


@check("P05", source="run")
def idle_stages(recorded: Recorded) -> Iterator[Finding]:
    for run in recorded.runs:
        if (bubble := run.metrics.bubble) and not run.is_crowded:
            plan = run.plan
            samples = plan.batch_size // (plan.replicas * plan.accumulate)
            schedule = plan.schedule or "gpipe"
            yield from run.report(
                judge_bubble(bubble.measured, plan.stages, plan.micro_batches, schedule, samples)
            )


def judge_bubble(
    measured: float, stages: int, micro_batches: int, schedule: str, samples: int
) -> Finding | None:
    """Too few micro-batches for the stages. `samples`: of one pass, which limits the number."""
    ideal = ideal_bubble(stages, micro_batches, schedule)
    enough = min(ENOUGH * stages, samples)
    better = ideal_bubble(stages, enough, schedule)
    if enough <= micro_batches or min(ideal, measured) < IDLE:
        return None
    passes = plural(micro_batches, "micro-batch")
    why = (
        f"{plural(stages, 'stage')} and {passes}: the stages idle {measured:.0%} of the time. "
        f"{schedule} needs at least {ideal:.0%} with so few."
    )
    fix = (
        f"Use {enough} micro-batches (n_microbatches={enough}; paralab: --micro-batches {enough}): "
        f"{better:.0%} idle at best."
    )
    evidence = (
        f"idle {measured:.0%}",
        f"ideal {ideal:.0%}",
        f"with {enough} micro-batches {better:.0%}",
    )
    gain = max(0.0, measured - better)
    return Finding("P05", "warning", why, fix, evidence=evidence, gain=gain)
