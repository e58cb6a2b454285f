"""Find the root cause of a failed run: the first rank that failed on its own, and its error."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paralab.machine.signals import describe_exit
from paralab.record.events import End, Error
from paralab.record.reader import read_events
from paralab.record.status_board import LEFT_EARLY, UNKNOWN_CODE
from paralab.record.victims import is_victim


@dataclass(frozen=True)
class Cause:
    rank: int
    what: str
    detail: str
    log: Path


def root_cause(
    folder: Path,
    exit_codes: list[int | None],
    logs: Path,
    attempt: int = 0,
    gone: Sequence[int] = (),
    words: Mapping[int, str] | None = None,
) -> Cause:
    """Return the first error that is not a consequence of another rank's exit. If there is none,
    return a rank that exited without an error, or else the rank that the others waited for.

    An exit code of None means that the launcher killed the rank. `gone` lists ranks that
    disappeared without an observed exit. `words` maps a rank to an error that it could not write to
    the run folder."""
    events = read_events(folder, attempt)
    last = [(event, rank) for rank, own in events.items() for event in own]
    errors = [(event, rank) for event, rank in last if isinstance(event, Error)]
    explained = {rank for event, rank in last if isinstance(event, End | Error)} | {*(words or {})}
    for rank, text in (words or {}).items():
        if rank not in {other for _, other in errors}:
            errors.append((Error(event="error", time=math.inf, error=text), rank))
    errors.sort(key=lambda pair: pair[0].time)

    def cause(rank: int, what: str, detail: str | None = None) -> Cause:
        log = logs / f"rank{rank}.txt"
        return Cause(rank, what, last_lines(log) if detail is None else detail, log)

    for error, rank in errors:
        if not is_victim(error.error, error.traceback):
            return cause(rank, error.error, error.detail or "")
    for rank in gone:
        return cause(rank, "it disappeared without an error: it was killed, or its node is down")
    for rank, code in enumerate(exit_codes):
        if code is not None and rank not in explained:
            return cause(rank, _describe_exit(code))
    if None in exit_codes:
        what = "it did not reach the point where the other ranks waited for it, so it was stopped"
        return cause(exit_codes.index(None), what, "")
    if errors:
        return cause(errors[0][1], errors[0][0].error, "")
    return cause(0, f"exit codes {exit_codes}", "")


def _describe_exit(code: int) -> str:
    """Describe the exit of a rank that did not write an error."""
    if code == LEFT_EARLY:
        return "it exited with code 0 before its work was done"
    if code == UNKNOWN_CODE:
        return "its parent, which started all ranks, was killed"
    return f"it {describe_exit(code)}" + (" without an error" if code >= 0 else "")


def last_lines(log: Path, number: int = 8) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-number:]) if log.exists() else ""
