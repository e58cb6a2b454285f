"""A08: Every step is skipped: the loss is NaN under the scaler."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="A08",
    title="Every step is skipped: the loss is NaN under the scaler",
    symptom="Training seems to run, but nothing is learnt; the scale halves in every step.",
    cause="NaN comes out of the model itself. The scaler takes it for an overflow, skips the step and scales less, for ever.",
    fix="Find the first layer that gives NaN (anomaly detection, hooks); stop when the scale falls below 1.",
    wrong="""\
scaler.step(optimizer)
scaler.update()
""",
    right="""\
scaler.step(optimizer)
scaler.update()
if scaler.get_scale() < 1:
    raise RuntimeError("gradients are not finite, however small the scale: look for NaN in forward")
""",
)
