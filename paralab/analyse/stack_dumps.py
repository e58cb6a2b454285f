"""Read the stack and the flight recorder that a rank dumped when the launcher's deadline passed."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from paralab.record.types import JsonObject, Record

R = TypeVar("R", bound=Record)
OURS = ("paralab/worker/", "paralab\\worker\\", "paralab/machine/child.py")
LIBRARIES = (
    "site-packages",
    "dist-packages",
    "/lib/python",
    "<frozen",
    "threading.py",
    "concurrent/futures",
)
# Collectives by their torch.distributed function name or flight recorder name.
KIND = re.compile(
    r"_?(?:monitored_)?i?(reduce_scatter|all_?reduce|all_?gather|all_?to_?all|broadcast|barrier"
    r"|scatter|gather|reduce|send|recv)"
    r"(?:_into)?(?:_(?:tensor|single|object|list|base|coalesced|uneven|internal))*",
    re.IGNORECASE,
)


class Frame(Record, frozen=True, kw_only=True):
    file: str
    line: int | None
    function: str
    code: str = ""


class FlightEntry(Record, frozen=True, kw_only=True):
    """A collective in torch's flight recorder. `process_group` is the group's name and
    description."""

    process_group: list[str]
    profiling_name: str
    collective_seq_id: int = 0
    is_p2p: bool | None = None
    retired: bool | None = None
    state: str | None = None
    input_sizes: list[list[int]] | None = None

    @property
    def group(self) -> str:
        return self.process_group[0]

    @property
    def is_open(self) -> bool:
        return not self.retired and self.state != "completed"

    @property
    def wait(self) -> Wait:
        name = self.profiling_name.split(":")[-1]
        values = sum(math.prod(size) for size in self.input_sizes or [])
        kind = _kind(name) or name
        if self.is_p2p:
            return Wait(kind, values)
        return Wait(kind, values, self.group, self.collective_seq_id)


@dataclass(frozen=True)
class Wait:
    """The collective that a rank waits in. Without the flight recorder, only its kind is known,
    from the stack."""

    kind: str
    values: int | None = None
    group: str | None = None
    number: int | None = None

    def __str__(self) -> str:
        if self.values is None:
            return self.kind
        return f"{self.kind} of {self.values:,} value{'' if self.values == 1 else 's'}"


@dataclass(frozen=True)
class StackDump:
    """One rank's answer to the launcher. `stack` is its main thread's stack, outermost call first,
    or empty if the rank did not answer."""

    rank: int
    asked: bool
    state: str | None
    answered: bool
    stack: list[Frame]
    collectives: list[FlightEntry]
    fault: str  # the fault handler's output

    @classmethod
    def read(cls, folder: Path, rank: int) -> StackDump:
        answer = _read_object(folder / f"rank{rank}.json")
        fault = folder / f"rank{rank}.txt"
        stacks = answer.get("stacks")
        return cls(
            rank=rank,
            # Each node's launcher asks only the ranks on that node.
            asked=(folder / f"rank{rank}.state").exists(),
            state=_read_object(folder / f"rank{rank}.state").get("state"),
            answered=bool(answer),
            stack=_convert((stacks or {}).get("MainThread", []), list[Frame]),
            collectives=_convert(answer.get("collectives", []), list[FlightEntry]),
            fault=fault.read_text(errors="replace") if fault.exists() else "",
        )

    @property
    def where(self) -> str | None:
        """The innermost line in the user's code, or else in paralab's, or else in any code."""
        if not self.stack:
            return _faulted_at(self.fault)
        skipped = (*LIBRARIES, *OURS, "<string>")
        own = [
            frame
            for frame in self.stack
            if not any(part in frame.file for part in skipped)
            and not frame.file.endswith(("runpy.py", "paralab/__main__.py"))
        ]
        ours = [frame for frame in self.stack if any(part in frame.file for part in OURS)]
        frame = (own or ours or self.stack)[-1]
        return f"{frame.file}:{frame.line} in {frame.function}: {frame.code}"

    @property
    def calls(self) -> str | None:
        """The kind of collective that the main thread is in, according to its stack. (gloo records
        a reduce_scatter as an all_reduce.)"""
        for frame in reversed(self.stack):
            file = frame.file.replace("\\", "/")
            if "torch/distributed" in file and (kind := _kind(frame.function)):
                return kind
            if not any(part in file for part in LIBRARIES):
                return None  # the caller does not matter
        return None

    @property
    def numbered(self) -> list[FlightEntry]:
        """Flight recorder entries except sends and receives, whose numbers do not match between
        ranks."""
        return [entry for entry in self.collectives if not entry.is_p2p]

    @property
    def waits_in(self) -> Wait | None:
        """The collective that this rank has started but not finished."""
        unfinished = [entry for entry in self.collectives if entry.is_open]
        if unfinished and _is_waiting(self.stack):
            last = unfinished[-1].wait
            return Wait(self.calls or last.kind, last.values, last.group, last.number)
        return Wait(self.calls) if self.calls else None

    def arrived(self, group: str) -> int:
        """Return the number of the last collective that this rank reached in a group."""
        numbers = [entry.collective_seq_id for entry in self.numbered if entry.group == group]
        return max(numbers, default=0)


def _kind(name: str) -> str | None:
    found = KIND.fullmatch(name.partition(" ")[0])
    if not found:
        return None
    return re.sub(r"^all_?(to)?_?", lambda all_: "all_to_" if all_[1] else "all_", found[1].lower())


def _is_waiting(stack: list[Frame]) -> bool:
    """Return whether the main thread is inside torch.distributed, or in autograd waiting for DDP
    buckets."""
    waits = ("wait", "_engine_run_backward", "synchronize", "barrier")
    return any("distributed" in frame.file or frame.function in waits for frame in stack[-3:])


def _faulted_at(fault: str) -> str | None:
    """Return the main thread's innermost line from the fault handler's output, which lists the
    innermost call first and the main thread last."""
    main = fault.rpartition("hread")[2].splitlines()[1:]
    lines = [line.strip() for line in main if line.strip().startswith("File ")]
    own = [line for line in lines if not any(part in line for part in (*LIBRARIES, *OURS))]
    return next(iter(own or lines), None)


def _read_object(path: Path) -> JsonObject:
    """Read a JSON object. Return an empty object if the file is missing or damaged, because the
    rank may have died while writing it."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _convert(value: object, to: type[list[R]]) -> list[R]:
    """Convert a value to a list of records. Return an empty list if that fails, because the flight
    recorder's format is private to torch and may change."""
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError:
        return []
