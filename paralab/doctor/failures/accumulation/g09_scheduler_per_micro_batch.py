"""G09: the scheduler steps for every micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.events import Scheduled
from paralab.doctor.failures.accumulation.windows import ASSUMED, Window, timelines, windows
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import Event, extra_tests
from paralab.doctor.windows import accumulated

ENTRY = Entry(
    id="G09",
    title="The scheduler steps for every micro-batch",
    symptom="No message. The learning rate falls N times too fast.",
    cause="`scheduler.step()` is outside the branch in which the optimizer steps.",
    fix="Step the scheduler where the optimizer steps.",
    example="""\
  if (i + 1) % N == 0:
      optimizer.step()
      optimizer.zero_grad()
- scheduler.step()
+     scheduler.step()
""",
    sources=("tracel-ai/burn#5695",),
    silent=True,
)


@check("G09", source="script")
def schedule_runs_ahead(script: Script) -> Iterator[Finding]:
    """Report a scheduler that also steps in iterations without an optimizer step."""
    reported = set()
    for window in windows(script):
        for events in timelines(script):
            for event in events if window.step in events else []:
                call = event.call
                if (
                    event.role != "schedule"
                    or window.number == 1
                    or call in reported
                    or not _is_ahead(window, event)
                ):
                    continue
                reported.add(call)
                many = window.number or f"`{window.size_text}`"
                why = (
                    f"`{code(call.node)}` runs for every micro-batch, `{code(window.step.call.node)}` "
                    f"({line_of(window.step.call, call)}) once in {many}. The learning rate changes too fast, unless the "
                    "schedule is meant to count micro-batches."
                )
                fix = "Step the scheduler right after the optimizer."
                severity: Severity = "suspect" if window.is_optional else "warning"
                yield found(script, "G09", severity, call, why, fix, also=(window.step.call,))


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
    """Report a line that steps the scheduler several times per optimizer step."""
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
        "micro-batches). Unless its length counts micro-batches, the learning rate changes "
        f"{len(events)} times too fast."
    )
    evidence = f"rank {rank.rank}: {len(rank.of(Scheduled))} scheduler steps, {len(rank.steps)} optimizer steps"
    return make_finding("G09", "warning", why, events[-1], evidence)
