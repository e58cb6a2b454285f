"""G09: The scheduler steps for every micro-batch.

Symptom: No error. The learning rate falls N times too fast.
Cause: `scheduler.step()` is outside the branch in which the optimizer steps.
Fix: Step the scheduler right after the optimizer.
Reported: tracel-ai/burn#5695

  if (i + 1) % N == 0:
      optimizer.step()
      optimizer.zero_grad()
- scheduler.step()
+     scheduler.step()
"""

from paralab.doctor.events import Scheduled
from paralab.doctor.failures.accumulation.windows import ASSUMED, Window, timelines, windows
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import Event, extra_tests, occurrences
from paralab.doctor.windows import accumulated

ENTRY = describe(__doc__, silent=True)


@check("G09", source="script")
def schedule_runs_ahead(script: Script) -> Findings:
    """Report a scheduler that also steps in iterations without an optimizer step."""
    for window in windows(script):
        for events, _, event in occurrences(timelines(script), "schedule"):
            if window.step in events and window.number != 1 and _is_ahead(window, event):
                call, step = event.call, window.step.call
                why = (
                    f"`{code(call.node)}` runs for every micro-batch, but `{code(step.node)}` "
                    f"({line_of(step, call)}) only once every {window.many} micro-batches, so the "
                    f"learning rate changes too fast."
                )
                doubt = "if the schedule counts optimizer steps"
                yield found(script, "G09", "warning", call, why, doubt=doubt, also=(step,))


def _is_ahead(window: Window, event: Event) -> bool:
    if window.loop not in event.path:
        return False
    if window.guard is None:
        return not extra_tests(event, window.backward) and event.loops == window.backward.loops
    for turn in range(2 * (window.number or ASSUMED)):
        env = window.env(turn, 99)
        if window.happens(event, env) is True and window.happens(window.step, env) is False:
            return True
    return False


@check_each_rank("G09")
def scheduled_too_often(rank: WatchedRank) -> Finding | None:
    every, often = list(accumulated(rank)), []
    for window in every:
        events = [event for event in window.events if isinstance(event, Scheduled)]
        if len(events) > 1 and len({event.site for event in events}) == 1:
            often.append((window, events))
    if len(often) < 2 or 2 * len(often) < len(every):
        return None
    window, events = often[-1]
    why = (
        f"The scheduler steps {len(events)} times per optimizer step ({len(window.micro_steps)} "
        "micro-batches). Unless it counts micro-batches, the learning rate changes too fast."
    )
    return make_finding("G09", "warning", why, events[-1])
