"""D07: GPUs of different strength."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

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
    messages=(
        Message(
            r"imbalance between your GPUs\. You may want to exclude GPU (?P<gpu>\d+) which",
            "GPU {gpu} has less than 75 % of the memory or cores of the largest one. DataParallel gives "
            "every GPU the same share, so each step waits for GPU {gpu}.",
            severity="warning",
            kind="printed",
        ),
    ),
)
