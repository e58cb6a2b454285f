"""A10: the GradScaler has disabled itself."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="A10",
    title="The GradScaler has disabled itself",
    symptom="'GradScaler is enabled, but CUDA is not available. Disabling.'",
    cause="GradScaler assumes CUDA unless you name another device, and this machine has no CUDA.",
    fix="Name the device you train on: `torch.amp.GradScaler('cpu')`.",
    example="""\
- scaler = torch.amp.GradScaler()
+ scaler = torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu")
""",
    messages=(
        Message(
            r"GradScaler is enabled, but CUDA is not available",
            "GradScaler was created for CUDA{at}. There is no CUDA here, so it disabled itself.",
            severity="warning",
            kind="printed",
        ),
    ),
)
