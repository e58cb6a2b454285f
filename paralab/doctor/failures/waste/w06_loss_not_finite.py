"""W06: The loss is not finite."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="W06",
    title="The loss is not finite",
    symptom="The loss is NaN or infinite from some step on, and stays so.",
    cause="One step with gradients that are not finite spoils every weight; nothing after it can be learnt.",
    fix="Stop there; go back to the last checkpoint, with a lower learning rate, clipping, or the bad sample left out.",
    wrong="""\
loss.backward()
optimizer.step()
""",
    right="""\
if not torch.isfinite(loss):
    raise ValueError(f"the loss is {loss.item()} in step {step}")
loss.backward()
optimizer.step()
""",
)
