"""Read events, even during a run or after a kill. A damaged line does not affect others."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Generic, Literal, TypeVar

import msgspec

from paralab.record.events import KINDS, End, Error, Event, Resume, Save, Step
from paralab.record.types import JsonObject, Record

T = TypeVar("T")
# How a run ended. `stopped` means that all ranks stopped after the same step and saved. `killed`
# means that a rank did not write an end event.
RunStatus = Literal["completed", "stopped", "failed", "interrupted", "killed"]
READ_BYTES = 64 << 20  # read this much of a file at once; no event is longer
NAME = re.compile(r"rank(\d+)(?:\.(\d+))?\.jsonl")


class Failure(Record, frozen=True, kw_only=True):
    """A failed attempt in a restarted run."""

    attempt: int
    problem: str
    unix_seconds: float | None = None


class Tail(Generic[T]):
    """Reads a growing file of events. `parse` returns None for a line that is not an event. If the
    file is mapped into memory (`MmapLog`), zeros follow its last line."""

    def __init__(
        self, path: Path, parse: Callable[[bytes], T | None], mapped: bool = False
    ) -> None:
        self.path, self._parse, self._mapped = path, parse, mapped
        self.damaged = 0  # how many lines so far were not events
        self._position = 0

    def new(self) -> list[T]:
        """Return the events in the complete lines that were added since the last call."""
        if not self.path.exists():
            return []
        events: list[T] = []
        with self.path.open("rb") as file:
            while complete := self._complete_lines(file):
                self._position += len(complete)
                lines = [line for line in complete.split(b"\n") if line]
                parsed = [self._parse(line) for line in lines if len(line) < READ_BYTES]
                readable = [event for event in parsed if event is not None]
                self.damaged += len(lines) - len(readable)
                events += readable
        return events

    def _complete_lines(self, file: BinaryIO) -> bytes:
        """Return the next complete lines. A longer line than any event counts as complete, so it
        does not fill the memory and is not read again."""
        file.seek(self._position)
        text = file.read(READ_BYTES)
        if self._mapped:
            text = text.partition(b"\0")[0]
        return text[: text.rfind(b"\n") + 1] or (text if len(text) == READ_BYTES else b"")


def read_events(
    folder: Path, attempt: int | None = None, damaged: Counter[int] | None = None
) -> dict[int, list[Event]]:
    """Return each rank's events, in the order in which they were written.

    Read one attempt, or all attempts if `attempt` is None. For all attempts, leave out steps that a
    later attempt repeated, and the end events of earlier attempts. Add the number of each rank's
    unusable lines to `damaged`.
    """
    ranks: dict[int, list[Event]] = {}
    events_folder = folder / "events"
    # Do not use glob, which treats a folder without read permission as empty.
    paths = events_folder.iterdir() if events_folder.is_dir() else ()
    # rank0.jsonl is rank 0's first attempt, and rank0.2.jsonl is its third.
    names = [match for path in paths if (match := NAME.fullmatch(path.name))]
    files = sorted((int(name[1]), int(name[2] or 0), name[0]) for name in names)
    for rank, number, file in files:
        if attempt not in (None, number):
            continue
        tail = Tail(events_folder / file, parse)
        events = tail.new()
        if damaged is not None:
            damaged[rank] += tail.damaged
        steps = [event.step for event in events if isinstance(event, Step | Resume)]
        first = min(steps, default=math.inf)
        before = [event for event in ranks.get(rank, []) if not isinstance(event, Error | End)]
        ranks[rank] = [event for event in before if not _is_of(event, first)] + events
    return ranks


def read_status(events: Mapping[int, list[Event]], world_size: int) -> RunStatus:
    ends = [event.status for rank in events.values() for event in rank if isinstance(event, End)]
    incomplete: tuple[RunStatus, ...] = ("failed", "interrupted", "stopped")
    for status in incomplete:
        if status in ends:
            return status
    return "completed" if len(ends) == world_size else "killed"


def read_failures(folder: Path) -> list[Failure]:
    path = folder / "failures.jsonl"
    failures = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(msgspec.ValidationError):
            failures.append(msgspec.convert(parse_object(line), Failure))
    return failures


def parse_watched(line: bytes) -> JsonObject | None:
    """Parse an event of a watched script (`paralab.observe`), which has different fields."""
    event = parse_object(line)
    return event if isinstance(event.get("event"), str) else None


def parse(line: bytes) -> Event | None:
    """Parse an event. Return None if this is not an event, or if a field is missing or wrong."""
    event = parse_watched(line)
    if event is None:
        return None
    try:
        # Events of an unknown kind come from a newer paralab version.
        return msgspec.convert(event, KINDS.get(event["event"], Event))
    except msgspec.ValidationError:
        return None


def parse_object(line: bytes) -> JsonObject:
    """Parse with `json`, because our writer writes NaN and msgspec rejects it."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_of(event: Event, step: float) -> bool:
    """Return whether an event belongs to this or a later step. A save never does, because it
    belongs to the step before it."""
    number = getattr(event, "step", None)
    return number is not None and number >= step and not isinstance(event, Save)
