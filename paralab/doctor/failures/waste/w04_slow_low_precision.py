"""W04: Low precision slower than fp32."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="W04",
    title="Low precision slower than fp32",
    symptom="autocast makes the step longer.",
    cause="The device has no fast units for that precision (many CPUs), or the matrices are too small: the casts cost more.",
    fix="Measure both, and take fp32 where it is faster.",
    wrong="""\
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = model(batch).mean()
""",
    right="""\
loss = model(batch).mean()
""",
)
