"""G01: The loss is not divided by the accumulation steps."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="G01",
    title="The loss is not divided by the accumulation steps",
    symptom="No message. The gradient is as many times too large as passes are accumulated.",
    cause="backward adds up; the sum of N means is N times the mean of the large batch.",
    fix="Divide the loss by N before backward.",
    wrong="""\
loss = criterion(model(x), y)
loss.backward()
if (i + 1) % N == 0:
    optimizer.step()
    optimizer.zero_grad()
""",
    right="""\
loss = criterion(model(x), y) / N
loss.backward()
if (i + 1) % N == 0:
    optimizer.step()
    optimizer.zero_grad()
""",
    sources=("verl-project/verl#3332",),
    silent=True,
)
