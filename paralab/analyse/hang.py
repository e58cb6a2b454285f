"""Who hung: from what every rank said when the launcher's patience was over, the rank that did not arrive, and where it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATES = {"T": "is stopped (SIGSTOP, or Ctrl-Z)", "t": "is held by a debugger", "D": "waits for a disk that does not answer"}
OURS = ("paralab/worker/", "paralab\\worker\\")
LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "<frozen", "threading.py", "concurrent/futures")


@dataclass(frozen=True)
class Testimony:
    """One rank's word. `stack`: its main thread, outermost call first; empty when it did not answer."""

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
        asked = (folder / f"rank{rank}.state").exists()  # a launcher of another node asks its own ranks
        return cls(rank, asked, state, bool(said), said.get("stacks", {}).get("MainThread", []), said.get("collectives", []), text)

    @property
    def where(self) -> str | None:
        """The innermost line of the user's own code; else of paralab's; else any."""
        if not self.stack:
            return _faulted_at(self.fault)
        own = [frame for frame in self.stack if not any(part in frame["file"] for part in (*LIBRARIES, *OURS, "<string>"))]
        own = [frame for frame in own if not frame["file"].endswith(("runpy.py", "paralab/__main__.py"))]
        ours = [frame for frame in self.stack if any(part in frame["file"] for part in OURS)]
        frame = (own or ours or self.stack)[-1]
        return f"{frame['file']}:{frame['line']} in {frame['function']}: {frame['code']}"

    @property
    def waits_in(self) -> dict[str, Any] | None:
        """The collective that this rank has begun and that is not over."""
        open_ = [entry for entry in self.collectives if not entry.get("retired") and entry.get("state") != "completed"]
        return open_[-1] if open_ and _is_waiting(self.stack) else None

    def arrived(self, group: str) -> int:
        """The number of the last collective of a group that this rank has come to."""
        numbers = [entry["collective_seq_id"] for entry in self.collectives if entry["process_group"][0] == group]
        return max(numbers, default=0)


@dataclass(frozen=True)
class Hang:
    rank: int
    why: str  # "is stopped …"
    where: str | None
    waiting: str | None  # what the others wait for


def who_hung(folder: Path, ranks: int, late: Sequence[int]) -> Hang:
    """The rank that is the cause: stopped, or not answering, or behind the others in a collective, or not waiting for anybody."""
    said = [Testimony.read(folder, rank) for rank in range(ranks)]
    waiting = _waited_for(said)

    def hang(testimony: Testimony, why: str) -> Hang:
        return Hang(testimony.rank, why, testimony.where, waiting)

    for testimony in said:
        if testimony.state in STATES:
            return hang(testimony, STATES[testimony.state])
    silent = [testimony for testimony in said if testimony.asked and not testimony.answered and testimony.state != "ended"]
    if silent:
        return hang(silent[0], "does not let go of the Python interpreter: none of its other threads could answer")
    behind = _behind(said)
    if behind is not None:
        return hang(said[behind], "did not arrive where the others wait for it")
    if all(testimony.waits_in for testimony in said) and len(said) > 1:
        return hang(said[0], "waits where all ranks have arrived: nobody is missing, so what lies between them is (the network)")
    busy = [testimony for testimony in said if testimony.waits_in is None and testimony.rank in late]
    culprit = busy[0] if busy else said[late[0] if late else 0]
    return hang(culprit, "did not come to the end")


def _behind(said: list[Testimony]) -> int | None:
    """The rank that has come to fewer collectives than another one which waits, in the group where that one waits."""
    for testimony in said:
        if entry := testimony.waits_in:
            group = entry["process_group"][0]
            known = [other for other in said if other.arrived(group)]  # of the group: another stage has groups of its own
            others = [(other.arrived(group), other.rank) for other in known if other.rank != testimony.rank]
            if others and min(others)[0] < testimony.arrived(group):
                return min(others)[1]
    return None


def _waited_for(said: list[Testimony]) -> str | None:
    for testimony in said:
        if entry := testimony.waits_in:
            kind = str(entry["profiling_name"]).split(":")[-1]
            values = sum(_product(size) for size in entry.get("input_sizes") or [])
            return f"rank {testimony.rank} waits in {kind} of {values:,} values, at {testimony.where}"
    return None


def _is_waiting(stack: list[dict[str, Any]]) -> bool:
    """The main thread is inside torch.distributed, or in autograd, which waits for DDP's buckets."""
    inner = stack[-3:]
    return any(
        "distributed" in f["file"] or f["function"] in ("wait", "_engine_run_backward", "synchronize", "barrier") for f in inner
    )


def _faulted_at(fault: str) -> str | None:
    """The innermost line of the main thread in a fault handler's text (innermost call first, the main thread last)."""
    main = fault.rpartition("hread")[2].splitlines()[1:]
    lines = [line.strip() for line in main if line.strip().startswith("File ")]
    own = [line for line in lines if not any(part in line for part in (*LIBRARIES, *OURS))]
    return next(iter(own or lines), None)


def _product(sizes: list[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
