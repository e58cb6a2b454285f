"""A10: The GradScaler has disabled itself.

Symptom: 'GradScaler is enabled, but CUDA is not available. Disabling.'
Cause: GradScaler assumes CUDA unless you name another device, and this machine has no CUDA.
Fix: Name the device you train on: `torch.amp.GradScaler('cpu')`.

- scaler = torch.amp.GradScaler()
+ scaler = torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu")
"""

from paralab.doctor.registry import describe, printed

ENTRY = describe(
    __doc__,
    printed(
        r"GradScaler is enabled, but CUDA is not available",
        "GradScaler was created for CUDA{at}. There is no CUDA here, so it disabled itself.",
        severity="warning",
    ),
)
