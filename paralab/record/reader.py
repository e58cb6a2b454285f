"""Reading events back, also while they are being written and after a kill: a cut last line is left
out, and a damaged one costs no other."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Event = dict[str, Any]
NAME = re.compile(r"rank\d+(\.\d+)?\.jsonl")

# What a field must be, in whatever event it is. None is what could not be measured.
WHOLE = (
    "step",
    "bucket",
    "stage",
    "micro",
    "accumulation",
    "samples",
    "bytes",
    "pid",
    "total",
    "zeros",
    "not_finite",
    "rss_bytes",
)
NUMBERS = (
    "time",
    "start",
    "end",
    "loss",
    "cpu_share",
    "unix_seconds",
    "blocked_seconds",
    "seconds",
)
TEXTS = ("device", "physical", "how", "status", "error", "folder")
LISTS = ("devices", "shape")
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(WHOLE, (int,)),
    **dict.fromkeys(NUMBERS, (int, float)),
    **dict.fromkeys(TEXTS, (str,)),
    **dict.fromkeys(LISTS, (list,)),
}
MAY_BE_NONE = ("stage", "rss_bytes", "loss")
# What an event of a kind must have. Any event that has a start, or an end, has both, and the step.
COLLECTIVE = ("start", "bucket", "bytes")
NEEDS = {
    "start": ("time", "pid", "devices"),
    "step": ("start", "samples", "loss"),
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), COLLECTIVE),
    **dict.fromkeys(("data", "forward", "backward", "optimizer"), ("start",)),
    "memory": ("device", "bytes", "how"),
    "load": ("time", "cpu_share", "rss_bytes", "devices"),
    "gradients": ("total", "zeros", "not_finite"),
    "split": ("step", "device", "physical", "shape"),
    "save": ("step", "folder", "blocked_seconds", "seconds"),
    "resume": ("step",),
    "error": ("time", "error"),
    "end": ("status",),
}


class Tail:
    """The new events of a growing file, each time it is asked.

    watched   a file that a watched script writes: it has other events than ours, and room after its last line, filled with zeros
              until a line is written there
    """

    def __init__(self, path: Path, watched: bool = False) -> None:
        self.path, self.watched = path, watched
        self.damaged = 0  # lines so far that are no events
        self._position = 0

    def new(self) -> list[Event]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        if self.watched:
            text = text.partition(b"\0")[
                0
            ]  # a line that is being written while we read may be there in parts: not yet
        complete = text.rpartition(b"\n")[0] + b"\n" if b"\n" in text else b""
        self._position += len(complete)
        lines = [line for line in complete.split(b"\n") if line]
        events = [
            event for line in lines if (event := parsed(line, ours=not self.watched)) is not None
        ]
        self.damaged += len(lines) - len(events)
        return events


def read_events(
    folder: Path, attempt: int | None = None, damaged: Counter[int] | None = None
) -> dict[int, list[Event]]:
    """rank -> its events, in the order in which they were written; of one attempt, or of all of
    them. Then what a later attempt did again, and how the earlier ones failed, is left out.
    `damaged`: count here the lines of each rank that cannot be used, also those that lack a
    field."""
    found: dict[int, list[Event]] = {}
    kept = folder / "events"
    paths = (
        kept.iterdir() if kept.is_dir() else ()
    )  # glob takes a folder that it may not read for an empty one
    for rank, number, path in sorted(
        _numbered(path) for path in paths if NAME.fullmatch(path.name)
    ):
        if attempt not in (None, number):
            continue
        tail = Tail(path)
        events = tail.new()
        if damaged is not None:
            whole = [event for event in events if is_complete(event)]
            damaged[rank] += tail.damaged + len(events) - len(whole)
            events = whole
        again = min(
            (event["step"] for event in events if event["event"] in ("step", "resume")),
            default=None,
        )
        if again is not None:
            found[rank] = [event for event in found.get(rank, []) if not _is_of(event, again)]
        found[rank] = [
            event for event in found.get(rank, []) if event["event"] not in ("error", "end")
        ] + events
    return found


def read_status(events: Mapping[int, list[Event]], world_size: int) -> str:
    """How a run ended: completed, failed, interrupted, stopped (and saved), or killed (no rank
    wrote how it ended)."""
    ends = [
        event.get("status")
        for list_ in events.values()
        for event in list_
        if event["event"] == "end"
    ]
    for status in ("failed", "interrupted", "stopped"):
        if status in ends:
            return status
    return "completed" if len(ends) == world_size else "killed"


def failures_of(folder: Path) -> list[dict[str, Any]]:
    """The attempts that failed, of a run that was started again."""
    path = folder / "failures.jsonl"
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found = [_object(line) for line in lines]
    return [
        line
        for line in found
        if isinstance(line.get("attempt"), int) and isinstance(line.get("problem"), str)
    ]


def _is_of(event: Event, step: int) -> bool:
    """Of this step, or a later one. (A checkpoint after N steps is of step N - 1.)"""
    return bool(event.get("step", -1) >= step and event["event"] != "save")


def _numbered(path: Path) -> tuple[int, int, Path]:
    """(rank, attempt, path): rank0.jsonl is the first attempt of rank 0, rank0.2.jsonl the
    third."""
    rank, _, attempt = path.stem.removeprefix("rank").partition(".")
    return int(rank), int(attempt or 0), path


def parsed(line: bytes, ours: bool = True) -> Event | None:
    """None: damaged. No event, or one of ours with a field of an impossible type."""
    event = _object(line)
    if not isinstance(event.get("event"), str) or (
        ours and not all(_is_possible(*field) for field in event.items())
    ):
        return None
    return event


def is_complete(event: Event) -> bool:
    """It has what its kind needs: a damaged name of a field leaves a line that can be parsed."""
    needs = NEEDS.get(event["event"], ())
    if {"start", "end"} & {*event, *needs}:
        needs = (*needs, "step", "start", "end")
    return all(name in event for name in needs) and event.get("start", 0.0) <= event.get(
        "end", math.inf
    )


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_possible(name: str, value: Any) -> bool:
    if name not in TYPES or (value is None and name in MAY_BE_NONE):
        return True
    return isinstance(value, TYPES[name]) and not isinstance(value, bool)
