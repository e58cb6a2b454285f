"""The scale of the gradients on a watched rank."""

from __future__ import annotations

from paralab.doctor.events import Amp


def scale_after(event: Amp, scale: float | None) -> float | None:
    """Return the scale of the gradients after a scaler call, or None if they are not scaled."""
    if not event.enabled:
        return scale
    if event.op == "scale":
        return event.scale or 0.0
    return None if event.op in ("unscale_", "update", "step") else scale
