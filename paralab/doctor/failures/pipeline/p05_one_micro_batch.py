"""P05: A pipeline with one micro-batch.

Symptom: No error. Only one stage works at a time: with S stages, the devices idle (S−1)/S of the time.
Cause: A single micro-batch cannot overlap with anything.
Fix: Use at least four micro-batches per stage.

- schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=loss_fn)
+ schedule = ScheduleGPipe(stage, n_microbatches=4 * stage.num_stages, loss_fn=loss_fn)
"""

from paralab.doctor.events import Pipeline
from paralab.doctor.failures.pipeline.schedules import micro_batches, schedules, stages
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.recorded import Run, check_each_run
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.doctor.static.report import found
from paralab.doctor.static.script import Script
from paralab.plan.schedules import ideal_bubble
from paralab.units import plural

ENTRY = describe(__doc__, silent=True)
IDLE = 0.15  # share of the stages' time; a smaller share is normal for a pipeline
ENOUGH = 4  # micro-batches per stage


@check_each_run("P05")
def idle_stages(run: Run) -> Finding | None:
    bubble, plan = run.metrics.bubble, run.plan
    if bubble is None or run.is_crowded:
        return None
    samples = plan.batch_size // (plan.replicas * plan.accumulate)
    schedule = plan.schedule or "gpipe"
    return judge_bubble(bubble.measured, plan.stages, plan.micro_batches, schedule, samples)


def judge_bubble(
    measured: float, stages: int, micro_batches: int, schedule: str, samples: int
) -> Finding | None:
    """Report too few micro-batches for the stages. `samples` is the number of samples per pass."""
    ideal = ideal_bubble(stages, micro_batches, schedule)
    enough = min(ENOUGH * stages, samples)
    better = ideal_bubble(stages, enough, schedule)
    if enough <= micro_batches or min(ideal, measured) < IDLE:
        return None
    passes = plural(micro_batches, "micro-batch")
    why = (
        f"With {plural(stages, 'stage')} and {passes}, the stages idle {measured:.0%} of the "
        f"time. With so few micro-batches, {schedule} idles at least {ideal:.0%}."
    )
    fix = (
        f"Use n_microbatches={enough} (paralab: --micro-batches {enough}). The stages then idle "
        f"{better:.0%} at best."
    )
    return Finding("P05", "warning", why, fix, gain=max(0.0, measured - better))


@check("P05", source="script")
def one_micro_batch(script: Script) -> Findings:
    for schedule in schedules(script):
        if "1F1B" in schedule.target or micro_batches(script, schedule) != 1:
            continue
        known = stages(script, schedule)
        share = f"{(known - 1) / known:.0%}" if known and known > 1 else "(S − 1)/S"
        why = f"With one micro-batch, only one stage works at a time, so the devices idle {share} of the time."
        yield found(script, "P05", "warning", schedule, why)


@check_each_rank("P05")
def observed_one_micro_batch(rank: WatchedRank) -> Finding | None:
    for event in (*rank.story, *rank.doing):
        if isinstance(event, Pipeline) and event.microbatches == 1 and event.stages > 1:
            idle, enough = (event.stages - 1) / event.stages, ENOUGH * event.stages
            why = (
                f"With one micro-batch, only one of the {event.stages} stages works at a time, and each "
                f"idles {idle:.0%} of the step."
            )
            fix = f"Use at least {enough} micro-batches: `{event.schedule}(stage, n_microbatches={enough}, …)`."
            gain = idle - (event.stages - 1) / (5 * event.stages - 1)
            return make_finding("P05", "warning", why, event.made_at or event, fix=fix, gain=gain)
    return None
