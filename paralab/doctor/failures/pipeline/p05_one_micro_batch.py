"""P05: a pipeline with one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.events import Pipeline
from paralab.doctor.failures.pipeline.schedules import micro_batches, schedules, stages
from paralab.doctor.finding import Finding
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.recorded import Recorded
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.report import found
from paralab.doctor.static.script import Script
from paralab.plan.schedules import ideal_bubble
from paralab.units import plural

ENTRY = Entry(
    id="P05",
    title="A pipeline with one micro-batch",
    symptom="No message. Only one stage works at a time: with S stages, the devices idle (S−1)/S of the time.",
    cause="A single micro-batch cannot overlap with anything.",
    fix="Use at least four micro-batches per stage.",
    example="""\
- schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=loss_fn)
+ schedule = ScheduleGPipe(stage, n_microbatches=4 * stage.num_stages, loss_fn=loss_fn)
""",
    silent=True,
)
IDLE = 0.15  # share of the stages' time: less is normal for a pipeline
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
    """Report too few micro-batches for the stages. `samples` of one pass limit their number."""
    ideal = ideal_bubble(stages, micro_batches, schedule)
    enough = min(ENOUGH * stages, samples)
    better = ideal_bubble(stages, enough, schedule)
    if enough <= micro_batches or min(ideal, measured) < IDLE:
        return None
    passes = plural(micro_batches, "micro-batch")
    why = (
        f"{plural(stages, 'stage')} and {passes}: the stages idle {measured:.0%} of the time. "
        f"{schedule} needs at least {ideal:.0%} with so few micro-batches."
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


@check("P05", source="script")
def one_micro_batch(script: Script) -> Iterator[Finding]:
    for schedule in schedules(script):
        if "1F1B" in schedule.target or micro_batches(script, schedule) != 1:
            continue
        known = stages(script, schedule)
        share = f"{(known - 1) / known:.0%}" if known and known > 1 else "(S − 1)/S"
        why = f"With one micro-batch only one stage works at a time: the devices idle {share} of the time."
        fix = "Use at least 4 micro-batches per stage."
        yield found(script, "P05", "warning", schedule, why, fix)


@check_each_rank("P05")
def observed_one_micro_batch(rank: WatchedRank) -> Finding | None:
    for event in (*rank.story, *rank.doing):
        if isinstance(event, Pipeline) and event.microbatches == 1 and event.stages > 1:
            idle, enough = (event.stages - 1) / event.stages, ENOUGH * event.stages
            why = (
                f"One micro-batch passes through {event.stages} stages one after the other: only one "
                f"stage works at a time, and each idles {idle:.0%} of the step."
            )
            fix = f"Use at least {enough} micro-batches: `{event.schedule}(stage, n_microbatches={enough}, …)`."
            evidence = f"idle share: (stages - 1) / (micro-batches + stages - 1) = {event.stages - 1}/{event.stages}"
            gain = idle - (event.stages - 1) / (5 * event.stages - 1)
            where = event.made_at or event
            return make_finding("P05", "warning", why, where, evidence, fix=fix, gain=gain)
    return None
