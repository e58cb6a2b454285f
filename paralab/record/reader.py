"""Read events back, also while they are being written and after a kill. A cut last line is left
out, and a damaged line costs no other."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from paralab.record.events import End, Error, Event, Resume, Save, Step, type_of
from paralab.record.types import JsonObject, Record

NAME = re.compile(r"rank\d+(\.\d+)?\.jsonl")


class Failure(Record, frozen=True, kw_only=True):
    """An attempt that failed, of a run that was restarted."""

    attempt: int
    problem: str
    unix_seconds: float | None = None


class _Lines:
    """The new complete lines of a growing file, each time it is asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0  # lines so far that are not events
        self._position = 0

    def _complete(self, text: bytes) -> bytes:
        return text.rpartition(b"\n")[0] + b"\n" if b"\n" in text else b""

    def _new_lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            complete = self._complete(file.read())
        self._position += len(complete)
        return [line for line in complete.split(b"\n") if line]


class Tail(_Lines):
    """The new events of one of our ranks."""

    def new(self) -> list[Event]:
        lines = self._new_lines()
        events = [event for line in lines if (event := parse(line)) is not None]
        self.damaged += len(lines) - len(events)
        return events


class WatchedTail(_Lines):
    """The new events of a watched script (`paralab.observe`), which are of other kinds. Its file is
    mapped into memory: zeros follow the last line until the next one is written."""

    def _complete(self, text: bytes) -> bytes:
        return super()._complete(text.partition(b"\0")[0])

    def new(self) -> list[JsonObject]:
        lines = self._new_lines()
        objects = [parse_object(line) for line in lines]
        events = [found for found in objects if isinstance(found.get("event"), str)]
        self.damaged += len(lines) - len(events)
        return events


def read_events(
    folder: Path, attempt: int | None = None, damaged: Counter[int] | None = None
) -> dict[int, list[Event]]:
    """rank -> its events in the order in which they were written.

    Of one attempt, or of all: then steps that a later attempt repeated are left out, and so is the
    way the earlier attempts ended. `damaged` counts the lines of each rank that cannot be used.
    """
    ranks: dict[int, list[Event]] = {}
    events_folder = folder / "events"
    # glob treats a folder that it may not read as empty; iterdir raises.
    paths = events_folder.iterdir() if events_folder.is_dir() else ()
    for rank, number, path in sorted(
        _numbered(path) for path in paths if NAME.fullmatch(path.name)
    ):
        if attempt not in (None, number):
            continue
        tail = Tail(path)
        events = tail.new()
        if damaged is not None:
            damaged[rank] += tail.damaged
        first = min(
            (event.step for event in events if isinstance(event, Step | Resume)), default=None
        )
        before = ranks.get(rank, [])
        if first is not None:
            before = [event for event in before if not _is_of(event, first)]
        ranks[rank] = [event for event in before if not isinstance(event, Error | End)] + events
    return ranks


def read_status(events: Mapping[int, list[Event]], world_size: int) -> str:
    """How a run ended: completed, failed, interrupted, stopped (and saved), or killed (a
    rank did not write how it ended)."""
    ends = [event.status for rank in events.values() for event in rank if isinstance(event, End)]
    for status in ("failed", "interrupted", "stopped"):
        if status in ends:
            return status
    return "completed" if len(ends) == world_size else "killed"


def read_failures(folder: Path) -> list[Failure]:
    """The attempts that failed, of a run that was restarted."""
    path = folder / "failures.jsonl"
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    failures = []
    for line in lines:
        try:
            failures.append(msgspec.convert(parse_object(line), Failure))
        except msgspec.ValidationError:
            continue
    return failures


def parse(line: bytes) -> Event | None:
    """None: damaged. The line is no event, or lacks a field of its kind, or has a wrong type."""
    event = parse_object(line)
    if not isinstance(event.get("event"), str):
        return None
    try:
        return msgspec.convert(event, type_of(event))
    except msgspec.ValidationError:
        return None


def parse_object(line: bytes) -> JsonObject:
    """Our writer's NaN is not JSON to msgspec, so `json` parses."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_of(event: Event, step: int) -> bool:
    """Of this step or a later one. (A checkpoint after N steps belongs to step N - 1.)"""
    number = getattr(event, "step", None)
    return number is not None and number >= step and not isinstance(event, Save)


def _numbered(path: Path) -> tuple[int, int, Path]:
    """(rank, attempt, path): rank0.jsonl is rank 0's first attempt, rank0.2.jsonl its third."""
    rank, _, attempt = path.stem.removeprefix("rank").partition(".")
    return int(rank), int(attempt or 0), path
