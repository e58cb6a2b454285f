"""Reading events back, also while they are being written and after a kill: a cut last line is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Tail:
    """The new events of a growing file, each time it is asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def new(self) -> list[Event]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            text = file.read().partition(b"\0")[0]  # a line that is being written while we read may be there in parts: not yet
        complete = text.rpartition(b"\n")[0] + b"\n" if b"\n" in text else b""
        self._position += len(complete)
        return [event for line in complete.splitlines() if (event := parsed(line)) is not None]


def read_events(folder: Path, attempt: int | None = None) -> dict[int, list[Event]]:
    """rank -> its events, in the order in which they were written; of one attempt, or of all of them. Then what a later attempt
    did again, and how the earlier ones failed, is left out."""
    found: dict[int, list[Event]] = {}
    for rank, number, path in sorted(_numbered(path) for path in (folder / "events").glob("rank[0-9]*.jsonl")):
        if attempt not in (None, number):
            continue
        events = Tail(path).new()
        again = min((event["step"] for event in events if event["event"] in ("step", "resume")), default=None)
        if again is not None:
            found[rank] = [event for event in found.get(rank, []) if not _is_of(event, again)]
        found[rank] = [event for event in found.get(rank, []) if event["event"] not in ("error", "end")] + events
    return found


def failures_of(folder: Path) -> list[dict[str, Any]]:
    """The attempts that failed, of a run that was started again."""
    path = folder / "failures.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _is_of(event: Event, step: int) -> bool:
    """Of this step, or a later one. (A checkpoint after N steps is of step N - 1.)"""
    return bool(event.get("step", -1) >= step and event["event"] != "save")


def _numbered(path: Path) -> tuple[int, int, Path]:
    """(rank, attempt, path): rank0.jsonl is the first attempt of rank 0, rank0.2.jsonl the third."""
    rank, _, attempt = path.stem.removeprefix("rank").partition(".")
    return int(rank), int(attempt or 0), path


def parsed(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
