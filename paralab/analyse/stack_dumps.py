"""One rank's word on where it is, given when the launcher's patience was over: its stack, and
torch's flight recorder."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS = ("paralab/worker/", "paralab\\worker\\", "paralab/machine/child.py")
LIBRARIES = (
    "site-packages",
    "dist-packages",
    "/lib/python",
    "<frozen",
    "threading.py",
    "concurrent/futures",
)
# What a rank can wait in: a function of torch.distributed, or what the flight recorder calls it.
KIND = re.compile(
    r"_?(?:monitored_)?i?(reduce_scatter|all_?reduce|all_?gather|all_?to_?all|broadcast|barrier|scatter|gather|reduce|send|recv)"
    r"(?:_into)?(?:_(?:tensor|single|object|list|base|coalesced|uneven|internal))*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Wait:
    """What a rank has begun and waits in. Without the flight recorder only the kind is known, from
    the stack."""

    kind: str
    values: int | None = None
    group: str | None = None
    number: int | None = None

    def __str__(self) -> str:
        values = (
            ""
            if self.values is None
            else f" of {self.values:,} value{'' if self.values == 1 else 's'}"
        )
        return f"{self.kind}{values}"


@dataclass(frozen=True)
class Testimony:
    """One rank's word. `stack`: its main thread, outermost call first; empty when it did not
    answer."""

    rank: int
    asked: bool
    state: str | None
    answered: bool
    stack: list[dict[str, Any]]
    collectives: list[dict[str, Any]]
    fault: str  # what the fault handler wrote

    @classmethod
    def read(cls, folder: Path, rank: int) -> Testimony:
        state = _json(folder / f"rank{rank}.state").get("state")
        said = _json(folder / f"rank{rank}.json")
        fault = folder / f"rank{rank}.txt"
        text = fault.read_text(errors="replace") if fault.exists() else ""
        asked = (
            folder / f"rank{rank}.state"
        ).exists()  # a launcher of another node asks its own ranks
        return cls(
            rank,
            asked,
            state,
            bool(said),
            said.get("stacks", {}).get("MainThread", []),
            said.get("collectives", []),
            text,
        )

    @property
    def where(self) -> str | None:
        """The innermost line of the user's own code; else of paralab's; else any."""
        if not self.stack:
            return _faulted_at(self.fault)
        own = [
            frame
            for frame in self.stack
            if not any(part in frame["file"] for part in (*LIBRARIES, *OURS, "<string>"))
        ]
        own = [
            frame
            for frame in own
            if not frame["file"].endswith(("runpy.py", "paralab/__main__.py"))
        ]
        ours = [frame for frame in self.stack if any(part in frame["file"] for part in OURS)]
        frame = (own or ours or self.stack)[-1]
        return f"{frame['file']}:{frame['line']} in {frame['function']}: {frame['code']}"

    @property
    def calls(self) -> str | None:
        """The kind of collective in which the main thread is, from its stack. (gloo records a
        reduce_scatter as an all_reduce.)"""
        for frame in reversed(self.stack):
            file = frame["file"].replace("\\", "/")
            if "torch/distributed" in file and (kind := _kind(frame["function"])):
                return kind
            if not any(part in file for part in LIBRARIES):
                return None  # what this was called from does not matter
        return None

    @property
    def numbered(self) -> list[dict[str, Any]]:
        """Sends and receives have numbers of their own, which do not match between ranks."""
        return [entry for entry in self.collectives if not entry.get("is_p2p")]

    @property
    def waits_in(self) -> Wait | None:
        """The collective that this rank has begun and that is not over."""
        open_ = [entry for entry in self.collectives if is_open(entry)]
        if open_ and _is_waiting(self.stack):
            last = wait_of(open_[-1])
            return Wait(self.calls or last.kind, last.values, last.group, last.number)
        return Wait(self.calls) if self.calls else None

    def arrived(self, group: str) -> int:
        """The number of the last collective of a group that this rank has come to."""
        numbers = [
            entry["collective_seq_id"]
            for entry in self.numbered
            if entry["process_group"][0] == group
        ]
        return max(numbers, default=0)


def is_open(entry: dict[str, Any]) -> bool:
    return not entry.get("retired") and entry.get("state") != "completed"


def wait_of(entry: dict[str, Any]) -> Wait:
    """An entry of the flight recorder."""
    name = str(entry["profiling_name"]).split(":")[-1]
    values = sum(math.prod(size) for size in entry.get("input_sizes") or [])
    if entry.get("is_p2p"):
        return Wait(_kind(name) or name, values)
    return Wait(_kind(name) or name, values, entry["process_group"][0], entry["collective_seq_id"])


def _kind(name: str) -> str | None:
    found = KIND.fullmatch(name.partition(" ")[0])
    return (
        re.sub(r"^all_?(to)?_?", lambda all_: "all_to_" if all_[1] else "all_", found[1].lower())
        if found
        else None
    )


def _is_waiting(stack: list[dict[str, Any]]) -> bool:
    """The main thread is inside torch.distributed, or in autograd, which waits for DDP's
    buckets."""
    inner = stack[-3:]
    return any(
        "distributed" in f["file"]
        or f["function"] in ("wait", "_engine_run_backward", "synchronize", "barrier")
        for f in inner
    )


def _faulted_at(fault: str) -> str | None:
    """The innermost line of the main thread in a fault handler's text (innermost call first, the
    main thread last)."""
    main = fault.rpartition("hread")[2].splitlines()[1:]
    lines = [line.strip() for line in main if line.strip().startswith("File ")]
    own = [line for line in lines if not any(part in line for part in (*LIBRARIES, *OURS))]
    return next(iter(own or lines), None)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
