"""Why a run failed: the rank and the error that came first, not the ranks that only noticed."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from paralab.record.reader import Event, read_events

# What a rank says when another one is gone. Never the cause.
VICTIMS = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Timed out waiting|Connection refused|NCCL.*(remote|abort)|DistBackendError",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Cause:
    rank: int
    step: int | None
    what: str
    detail: str
    log: Path


def root_cause(folder: Path, exit_codes: list[int]) -> Cause:
    """The first error that is not a consequence of another rank's end; else the rank that died without a word."""
    events = read_events(folder)
    errors = [(event, rank) for rank, list_ in events.items() for event in list_ if event["event"] == "error"]
    own = sorted((e for e in errors if not VICTIMS.search(e[0]["error"])), key=lambda e: float(e[0]["time"]))
    silent = [rank for rank, code in enumerate(exit_codes) if code and not any(r == rank for _, r in errors)]
    if own:
        event, rank = own[0]
        return Cause(rank, _last_step(events.get(rank, [])), event["error"], event.get("detail", ""), _log(folder, rank))
    killed = [rank for rank in silent if exit_codes[rank] < 0 and exit_codes[rank] != -signal.SIGTERM] or silent
    if killed:
        rank, code = killed[0], exit_codes[killed[0]]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code} without an error"
        return Cause(rank, _last_step(events.get(rank, [])), how, _last_lines(_log(folder, rank)), _log(folder, rank))
    if errors:
        event, rank = min(errors, key=lambda e: float(e[0]["time"]))
        return Cause(rank, _last_step(events.get(rank, [])), event["error"], "", _log(folder, rank))
    return Cause(0, None, f"exit codes {exit_codes}", "", _log(folder, 0))


def _last_step(events: list[Event]) -> int | None:
    return max((event["step"] for event in events if event["event"] == "step"), default=None)


def _log(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"rank{rank}.txt"


def _last_lines(log: Path, number: int = 8) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-number:]) if log.exists() else ""
