"""A01: Clipping gradients that are still scaled."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="A01",
    title="Clipping gradients that are still scaled",
    symptom="No message. Every gradient is clipped (its norm is thousands of times too large), and nearly nothing is learnt.",
    cause="clip_grad_norm_ runs between scale(loss).backward() and step() without unscale_.",
    fix="`scaler.unscale_(optimizer)` before clipping.",
    wrong="""\
scaler.scale(loss).backward()
clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
""",
    right="""\
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
""",
    sources=("milesial/Pytorch-UNet#470",),
    silent=True,
)
