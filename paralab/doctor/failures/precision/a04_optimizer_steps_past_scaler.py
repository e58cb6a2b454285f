"""A04: optimizer.step() although the loss was scaled."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="A04",
    title="optimizer.step() although the loss was scaled",
    symptom=(
        "With update(): 'No inf checks were recorded prior to update'. Without: no message, and steps that are "
        "65536 times too large. After unscale_: no message, and weights that are NaN after the first overflow."
    ),
    cause=(
        "The optimizer takes the gradients as they are. Only scaler.step() unscales them, if unscale_() has not, and leaves "
        "out a step whose gradients have overflowed."
    ),
    fix="`scaler.step(optimizer)`.",
    wrong="""\
scaler.scale(loss).backward()
optimizer.step()
scaler.update()
""",
    right="""\
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
    silent=True,
)
