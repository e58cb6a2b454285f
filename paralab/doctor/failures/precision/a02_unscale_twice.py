"""A02: unscale_ twice in one step."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="A02",
    title="unscale_ twice in one step",
    symptom="'unscale_() has already been called on this optimizer since the last update()'.",
    cause="It stands in every micro-batch, or update() was skipped together with the step.",
    fix="Unscale once, just before the step, and update after each.",
    wrong="""\
for x, y in micro_batches:
    scaler.scale(criterion(model(x), y) / N).backward()
    scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
""",
    right="""\
for x, y in micro_batches:
    scaler.scale(criterion(model(x), y) / N).backward()
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
""",
    sources=(
        "huggingface/accelerate#641",
        "microsoft/Swin-Transformer#311",
        "Haian-Jin/LVSM#19",
        "huggingface/transformers#24840",
    ),
)
