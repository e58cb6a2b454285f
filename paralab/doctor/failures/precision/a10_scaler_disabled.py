"""A10: The GradScaler has switched itself off."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="A10",
    title="The GradScaler has switched itself off",
    symptom="'GradScaler is enabled, but CUDA is not available. Disabling.'",
    cause="GradScaler is for CUDA unless another device is named, and there is none here.",
    fix="Name the device that is trained on: `torch.amp.GradScaler('cpu')`.",
    wrong="""\
scaler = torch.amp.GradScaler()
""",
    right="""\
scaler = torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu")
""",
)
