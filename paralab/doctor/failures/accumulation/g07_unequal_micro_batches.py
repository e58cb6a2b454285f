"""G07: Micro-batches of different size count the same."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="G07",
    title="Micro-batches of different size count the same",
    symptom="No message. The gradient is not the one of the large batch (19 % off for micro-batches of 3, 3 and 2 samples).",
    cause="A mean of means weighs a sample in a small micro-batch more.",
    fix="Weigh every micro-batch by its number of samples, or drop the smaller one.",
    wrong="""\
for x, y in micro_batches:
    loss = criterion(model(x), y) / len(micro_batches)
    loss.backward()
""",
    right="""\
samples = sum(len(x) for x, _ in micro_batches)
for x, y in micro_batches:
    loss = criterion(model(x), y) * len(x) / samples
    loss.backward()
""",
    sources=("Lightning-AI/pytorch-lightning#19987",),
    silent=True,
)
