"""The scaler calls on watched ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paralab.doctor.events import Amp
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import make_finding


def scale_after(event: Amp, scale: float | None) -> float | None:
    """Return the scale of the gradients after a scaler call, or None if they are not scaled."""
    if not event.enabled:
        return scale
    if event.op == "scale":
        return event.scale or 0.0
    return None if event.op in ("unscale_", "update", "step") else scale


def failed_call(
    seen: Observation, entry: str, ops: tuple[str, ...], message: str, why: str
) -> Iterator[Finding]:
    """Report a scaler call that raised this message."""
    for rank in seen.ranks:
        for event in rank.of(Amp):
            if event.op in ops and event.error and re.search(message, event.error):
                evidence = f"rank {rank.rank}: {event.error.splitlines()[0][:160]}"
                yield make_finding(entry, "error", why, event, evidence)
                return
