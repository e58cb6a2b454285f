"""W01: Communication takes more than a tenth of the step.

Symptom: Adding ranks barely speeds up training.
Cause: Ranks send many bytes per synchronization, but compute little in between.
Fix: Compute more per synchronization, with a larger batch per rank or accumulation under no_sync()
(paralab: --accumulate). Or send less, with bf16_compress_hook. Or overlap more, with smaller
buckets (paralab: --bucket-mb).

- loader = DataLoader(data, batch_size=8, sampler=sampler)
+ loader = DataLoader(data, batch_size=64, sampler=sampler)
  model = DistributedDataParallel(model)
+ model.register_comm_hook(None, default_hooks.bf16_compress_hook)
"""

import statistics

from paralab.analyse.metrics import RULE
from paralab.analyse.phrases import collectives_per_step
from paralab.doctor.events import Collective, Event
from paralab.doctor.failures.waste.timing import (
    Window,
    measured_windows,
    reductions,
    report_at,
    step_seconds,
)
from paralab.doctor.observation import Observation
from paralab.doctor.recorded import Run, check_each_run
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.units import plural, seconds, size

ENTRY = describe(__doc__)
SMALL = 0.02  # a smaller share of the step is not worth reporting


def judge_communication(
    communication: float, exposed: float, step: float, how: str
) -> Finding | None:
    """Report too much communication, described by `how`. Overlapped communication costs nothing."""
    if not step or communication < RULE * step or exposed < SMALL * step:
        return None
    why = (
        f"Communication takes {seconds(communication)}, {communication / step:.0%} of a step of "
        f"{seconds(step)} (below {RULE:.0%} is normal): {how}. {seconds(exposed)} of it "
        f"({exposed / step:.0%} of the step) does not overlap with computation."
    )
    return Finding("W01", "warning", why, gain=exposed / step)


@check_each_run("W01")
def communication_in_run(run: Run) -> Finding | None:
    if run.plan.strategy == "dp":
        how = "nn.DataParallel copies the model and gathers outputs and gradients in every step"
    else:
        sent = size(run.result.bytes_per_step)
        how = f"{collectives_per_step(run.result)}, {sent} in total, per step and rank"
    spent = run.metrics.communication_seconds or 0.0
    exposed = run.metrics.exposed_communication_seconds or 0.0
    return judge_communication(spent, exposed, run.step_seconds, how)


@check("W01", source="ranks")
def communication_on_ranks(seen: Observation) -> Findings:
    """Report slow communication: the user's collectives, and those that DDP measured."""
    per_rank = measured_windows(seen)
    if len(per_rank) < 2:
        return
    step = step_seconds(per_rank)
    windows = [[_collectives(window) for window in rank] for rank in per_rank]
    if any(windows[0]):
        spent = statistics.median(
            sum(
                min(times)
                for times in zip(*(map(_seconds, calls) for calls in round_), strict=False)
            )
            for round_ in zip(*windows, strict=True)
        )
        largest = max((call for calls in windows[0] for call in calls), key=_seconds)
        count = round(statistics.median(map(len, windows[0])))
        how = f"{plural(count, 'collective')} per step, mostly at {largest.site}"
        yield from report_at(largest.site, judge_communication(spent, spent, step, how))
    if reduced := reductions(seen):
        how = (
            f"DDP sends {plural(len(reduced.sizes), 'bucket')} ({size(sum(reduced.sizes))} in total) "
            f"in every step, {seconds(reduced.transfer)} from the first to the last byte"
        )
        # A rank may compute between two buckets. Only the exposed part is definitely communication.
        finding = judge_communication(reduced.exposed, reduced.exposed, step, how)
        yield from report_at(reduced.site, finding)


def _collectives(window: Window) -> list[Collective]:
    """Return the collectives that the user's code waited for. Sends and receives do not count: they
    wait for the other side to compute."""
    calls = [event for event in window.events if isinstance(event, Collective)]
    return [call for call in calls if call.seq and call.seconds and not call.asynchronous]


def _seconds(event: Event) -> float:
    return event.seconds or 0.0
