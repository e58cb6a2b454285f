"""Where a victim stood in the user's code, in words; and the finding for one that stood there
alone."""

from __future__ import annotations

from paralab.doctor.finding import Finding
from paralab.doctor.logs.blame import Event


def stands(event: Event) -> str:
    """ "in the gradient all-reduce of `loss.backward()` (train.py:31)"."""
    at = event.trace.where if event.trace else None
    if at is None:
        return "somewhere that its traceback does not tell"
    what = (
        "the gradient all-reduce of "
        if event.in_backward
        else "DDP's broadcast of buffers in "
        if event.in_buffers
        else ""
    )
    return f"in {what}`{at.code}` ({at.file}:{at.line})"


def alone(event: Event, why: str, evidence: tuple[str, ...] = ()) -> Finding:
    """The file shows that the call stands under a rank condition: the rank that waited is the
    culprit."""
    at = event.trace.where if event.trace else None
    id, fix = (
        "H03",
        "call the collective on all ranks; do only the local work (saving, printing) under the rank condition",
    )
    if event.in_buffers:
        id, fix = (
            "H07",
            "evaluate on all ranks, or through model.module(...) under the rank condition",
        )
        why += " The wrapper broadcasts buffers (BatchNorm) at every forward, and that takes all ranks."
    return Finding(
        id,
        "error",
        why,
        fix,
        at.file if at else None,
        at.line if at else None,
        event.rank,
        (*event.evidence(), *evidence),
    )
