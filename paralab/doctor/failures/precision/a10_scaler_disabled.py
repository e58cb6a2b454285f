"""A10: The GradScaler has disabled itself."""

from paralab.doctor.registry import describe, printed

ENTRY = describe(
    __doc__,
    symptom="'GradScaler is enabled, but CUDA is not available. Disabling.'",
    cause="GradScaler assumes CUDA unless you name another device, and this machine has no CUDA.",
    fix="Name the device you train on: `torch.amp.GradScaler('cpu')`.",
    example="""\
- scaler = torch.amp.GradScaler()
+ scaler = torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu")
""",
    messages=(
        printed(
            r"GradScaler is enabled, but CUDA is not available",
            "GradScaler was created for CUDA{at}. There is no CUDA here, so it disabled itself.",
            severity="warning",
        ),
    ),
)
