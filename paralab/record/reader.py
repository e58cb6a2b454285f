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
            text = file.read()
        complete = text.rpartition(b"\n")[0] + b"\n" if b"\n" in text else b""
        self._position += len(complete)
        return [event for line in complete.splitlines() if (event := _parsed(line)) is not None]


def read_events(folder: Path) -> dict[int, list[Event]]:
    """rank -> its events, in the order in which they were written."""
    files = sorted((folder / "events").glob("rank[0-9]*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
    return {int(path.stem.removeprefix("rank")): Tail(path).new() for path in files}


def _parsed(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
