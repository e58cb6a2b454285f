"""A09: Backward inside autocast."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="A09",
    title="Backward inside autocast",
    symptom="Usually none; under torch.compile the gradients may be wrong without a message.",
    cause="Backward already runs in the types that forward chose; a second choice is not wanted.",
    fix="End the autocast block after the loss.",
    wrong="""\
with torch.autocast("cuda"):
    loss = criterion(model(x), y)
    loss.backward()
""",
    right="""\
with torch.autocast("cuda"):
    loss = criterion(model(x), y)
loss.backward()
""",
    silent=True,
)
