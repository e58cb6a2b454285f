"""D07: GPUs of different strength."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="D07",
    title="GPUs of different strength",
    symptom="'There is an imbalance between your GPUs. You may want to exclude GPU …'.",
    cause="Every GPU gets an equal share, so the weakest decides the step time and the possible batch.",
    fix="Name the equal ones in device_ids.",
    wrong="""\
model = nn.DataParallel(net)
""",
    right="""\
model = nn.DataParallel(net, device_ids=[0, 1])
""",
    limits="Needs unequal GPUs; recognized in logs.",
)
