"""G04: An optimizer step on gradients that were not synchronized."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="G04",
    title="An optimizer step on gradients that were not synchronized",
    symptom="No message. The ranks' parameters differ, and later steps do not bring them together again.",
    cause="The last pass before the step also ran under no_sync(), or the data ended inside a no_sync() window.",
    fix="Synchronize in the last pass before every step, and in the last batch of the epoch.",
    wrong="""\
with model.no_sync():
    loss = criterion(model(x), y)
    loss.backward()
optimizer.step()
""",
    right="""\
loss = criterion(model(x), y)
loss.backward()
optimizer.step()
""",
    silent=True,
)
