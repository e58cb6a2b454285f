"""A07: The scheduler steps although the scaler skipped the step."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="A07",
    title="The scheduler steps although the scaler skipped the step",
    symptom="'Detected call of lr_scheduler.step() before optimizer.step()', although the order in the code is right.",
    cause="The first steps of fp16 often overflow; the scaler skips the optimizer, and the schedule goes on without it.",
    fix="Step the scheduler only if the scale did not fall.",
    wrong="""\
scaler.step(optimizer)
scaler.update()
scheduler.step()
""",
    right="""\
before = scaler.get_scale()
scaler.step(optimizer)
scaler.update()
if scaler.get_scale() >= before:
    scheduler.step()
""",
    sources=(
        "Lightning-AI/pytorch-lightning#5558",
        "Lightning-AI/pytorch-lightning#18828",
        "pytorch/pytorch#44511",
        "princeton-vl/RAFT#104",
    ),
)
