"""S08: Only rank 0 takes the optimizer step."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="S08",
    title="Only rank 0 takes the optimizer step",
    symptom="No message. Rank 0 learns, the others keep their first weights and send gradients that no longer fit.",
    cause="DDP synchronizes gradients, never parameters: every rank must apply the same step itself.",
    fix="Step on every rank.",
    wrong="""\
loss.backward()
if dist.get_rank() == 0:
    optimizer.step()
""",
    right="""\
loss.backward()
optimizer.step()
""",
    silent=True,
)
