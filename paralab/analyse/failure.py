"""Why a run failed: the rank and the error that came first, not the ranks that only noticed."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paralab.record.events import End, Error
from paralab.record.reader import read_events
from paralab.record.status_board import LEFT_EARLY, UNSEEN

# What a rank says when another one is gone, or did not come while it waited. Never the cause.
GONE = re.compile(
    r"onnection (?:closed|reset) by peer|Broken pipe|ncclRemoteError|remote process (?:has )?exited|Socket closed|ECONNRESET"
    r"|Application timeout caused pair closure"
)
WAITED = re.compile(
    r"Timed out waiting \d+ ?ms|Watchdog caught collective|wait timeout after|Socket Timeout|monitoredBarrier"
    r"|ollective operation timeout|clients joined|client socket has timed out|communicator was aborted|barrier.{0,40}timed out"
)
BETWEEN_RANKS = re.compile(
    r"gloo|nccl|NCCL|c10d|TCPStore|Store|pair\.cc|pair closure|monitoredBarrier|Watchdog"
    r"|torch[/\\.]distributed|torch/autograd|Dist\w+Error"
)
VICTIMS = re.compile(
    rf"{GONE.pattern}|{WAITED.pattern}|Timed out waiting|wait timeout|Application timeout|Connection refused|NCCL.*(remote|abort)"
    r"|Dist(Backend|Network|Store)Error",
    re.IGNORECASE,
)


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
    """The first error that is not a consequence of another rank's end; else a rank that ended
    without an error; else the rank that the others waited for.

    An exit code None is a rank that the launcher ended. `gone`: ranks whose end nobody saw.
    `words`: errors that ranks could not write to the run folder."""
    events = read_events(folder, attempt)
    errors = [
        (event, rank)
        for rank, list_ in events.items()
        for event in list_
        if isinstance(event, Error)
    ]
    written = {rank for _, rank in errors}
    errors += [
        (Error(event="error", time=math.inf, error=text), rank)
        for rank, text in (words or {}).items()
        if rank not in written
    ]
    ended = {rank for rank, list_ in events.items() if any(isinstance(e, End) for e in list_)}
    own = sorted((e for e in errors if not is_victim(e[0])), key=lambda e: e[0].time)
    spoke = ended | {rank for _, rank in errors}
    left = [rank for rank, code in enumerate(exit_codes) if code is not None and rank not in spoke]
    stuck = [rank for rank, code in enumerate(exit_codes) if code is None]

    def cause(rank: int, what: str, detail: str = "") -> Cause:
        return Cause(rank, what, detail, logs / f"rank{rank}.txt")

    if own:
        return cause(own[0][1], own[0][0].error, own[0][0].detail or "")
    if gone:
        return cause(
            gone[0],
            "is gone without a word: it was killed, or its node is down",
            last_lines(logs / f"rank{gone[0]}.txt"),
        )
    if left:
        code = exit_codes[left[0]] or 0
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with code {code} without an error"
        )
        if code == LEFT_EARLY:
            how = "ended itself with code 0 before its work was done"
        if code == UNSEEN:
            how = "the process that had started all ranks was killed"
        return cause(left[0], how, last_lines(logs / f"rank{left[0]}.txt"))
    if stuck:
        return cause(stuck[0], "did not arrive where the other ranks waited for it, and was ended")
    if errors:
        event, rank = min(errors, key=lambda e: e[0].time)
        return cause(rank, event.error)
    return cause(0, f"exit codes {exit_codes}")


def is_victim(error: Error) -> bool:
    """Lost connections are another rank's doing only where ranks talk: the user's own download may
    lose one as well."""
    text, trace = error.error, error.traceback
    return bool(
        VICTIMS.search(text) and (trace is None or BETWEEN_RANKS.search(f"{text}\n{trace}"))
    )


def last_lines(log: Path, number: int = 8) -> str:
    """The end of what a process has printed; empty if it is not there."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-number:]) if log.exists() else ""
