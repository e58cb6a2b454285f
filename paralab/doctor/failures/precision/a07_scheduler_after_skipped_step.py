"""A07: The scheduler steps although the scaler skipped the step."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.agreement import found, place_of
from paralab.doctor.events import Amp, Scheduled
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation
from paralab.doctor.registry import Entry, Message, check

ENTRY = Entry(
    id="A07",
    title="The scheduler steps although the scaler skipped the step",
    symptom="'Detected call of lr_scheduler.step() before optimizer.step()', although the order in the code is right.",
    cause="The first fp16 steps often overflow. The scaler skips the optimizer, and the schedule moves on without it.",
    fix="Step the scheduler only if the scale did not shrink.",
    example="""\
+ before = scaler.get_scale()
  scaler.step(optimizer)
  scaler.update()
- scheduler.step()
+ if scaler.get_scale() >= before:
+     scheduler.step()
""",
    sources=(
        "Lightning-AI/pytorch-lightning#5558",
        "Lightning-AI/pytorch-lightning#18828",
        "pytorch/pytorch#44511",
        "princeton-vl/RAFT#104",
    ),
    messages=(
        Message(
            r"Detected call of `lr_scheduler\.step\(\)` before `optimizer\.step\(\)`",
            "PyTorch warns{at} that the scheduler stepped before the optimizer. With a GradScaler "
            "the order in the script can be right: the scaler skipped the first step because of an "
            "infinite gradient. Without a scaler, the two calls are in the wrong order.",
            severity="suspect",
            kind="printed",
        ),
    ),
)


@check("A07", source="ranks")
def scheduled_after_a_skip(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        skipped: Amp | None = None
        for event in rank.events:
            if isinstance(event, Amp) and event.op == "step":
                skipped = event if event.skipped else None
            elif isinstance(event, Scheduled) and skipped is not None:
                total = sum(bool(amp.skipped) for amp in rank.of(Amp))
                why = (
                    f"The scaler skipped step {event.step + 1} because its gradients overflowed, but the scheduler "
                    "stepped anyway. The learning rate runs ahead of the optimizer."
                )
                fix = "before = scaler.get_scale(); scaler.update(); if scaler.get_scale() >= before: scheduler.step()"
                evidence = (
                    f"rank {rank.rank}: {total} steps skipped, {len(rank.steps)} taken, "
                    f"{len(rank.of(Scheduled))} scheduler steps"
                )
                yield found("A07", "warning", why, fix, place_of(event), [evidence])
                return
