"""G02: Every accumulated pass synchronizes."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="G02",
    title="Every accumulated pass synchronizes",
    symptom="Right results, slow steps: N all-reduces of all gradients where one would do.",
    cause="DDP synchronizes in every backward unless it runs under no_sync().",
    fix="Run all passes but the last of a step under `model.no_sync()`.",
    wrong="""\
for i, (x, y) in enumerate(loader):
    (criterion(model(x), y) / N).backward()
    if (i + 1) % N == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    right="""\
for i, (x, y) in enumerate(loader):
    with nullcontext() if (i + 1) % N == 0 else model.no_sync():
        (criterion(model(x), y) / N).backward()
    if (i + 1) % N == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    sources=(
        "speechbrain/speechbrain#1802",
        "goodfire-ai/spd#215",
        "Lightning-AI/pytorch-lightning#2595",
    ),
    silent=True,
)
