"""G09: The scheduler steps in every micro-batch."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="G09",
    title="The scheduler steps in every micro-batch",
    symptom="No message. The learning rate falls N times too fast.",
    cause="scheduler.step() stands outside of the branch in which the optimizer steps.",
    fix="Step the scheduler where the optimizer steps.",
    wrong="""\
if (i + 1) % N == 0:
    optimizer.step()
    optimizer.zero_grad()
scheduler.step()
""",
    right="""\
if (i + 1) % N == 0:
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
""",
    sources=("tracel-ai/burn#5695",),
    silent=True,
)
