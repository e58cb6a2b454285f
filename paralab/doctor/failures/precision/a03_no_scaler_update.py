"""A03: scaler.update() is missing."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="A03",
    title="scaler.update() is missing",
    symptom="'step() has already been called since the last update()'.",
    cause="The scaler is stepped twice without the update in which it adapts its scale.",
    fix="`scaler.update()` after every `scaler.step()`.",
    wrong="""\
scaler.scale(loss).backward()
scaler.step(optimizer)
""",
    right="""\
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
)
