"""A11: The scaler steps, but the loss was never scaled."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="A11",
    title="The scaler steps, but the loss was never scaled",
    symptom="'Attempted step but _scale is None'.",
    cause="loss.backward() was called without scaler.scale(…).",
    fix="`scaler.scale(loss).backward()`.",
    wrong="""\
loss.backward()
scaler.step(optimizer)
scaler.update()
""",
    right="""\
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
)
