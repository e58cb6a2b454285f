"""Read the stack and the Flight Recorder entries that a rank dumped when it exceeded the
launcher's deadline."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import msgspec

from paralab.analyse import collective_matching as matching
from paralab.analyse.collective_matching import LIBRARIES, CollectiveCall
from paralab.record.reader import parse_object
from paralab.record.types import JsonObject, Record

OURS = ("paralab/worker/", "paralab\\worker\\", "paralab/machine/child.py")
# The letter that `ps` shows for a process that is not running.
STOPPED = {
    "T": "is stopped (SIGSTOP or Ctrl-Z)",
    "t": "is stopped by a debugger",
    "D": "is waiting for a disk that does not respond",
}


class Frame(Record, frozen=True, kw_only=True):
    file: str
    line: int | None
    function: str
    code: str = ""

    @property
    def is_library(self) -> bool:
        return any(part in self.file.replace("\\", "/") for part in LIBRARIES)


@dataclass(frozen=True)
class StackDump:
    """A rank's stack dump. `stack` is the main thread's stack, outermost call first."""

    rank: int
    asked: bool
    state: str | None
    answered: bool
    stack: list[Frame]
    collectives: list[CollectiveCall]
    fault: str  # the fault handler's output

    @classmethod
    def read(cls, folder: Path, rank: int) -> Self:
        answer = _read_object(folder / f"rank{rank}.json")
        state, fault = folder / f"rank{rank}.state", folder / f"rank{rank}.txt"
        stack, collectives = _convert(answer)
        return cls(
            rank=rank,
            asked=state.exists(),  # a node's launcher asks only its own ranks
            state=_read_object(state).get("state"),
            answered=bool(answer),
            stack=stack,
            collectives=collectives,
            fault=fault.read_text(errors="replace") if fault.exists() else "",
        )

    @property
    def where(self) -> str | None:
        """The innermost line in the user's code, or else in paralab's, or else in any code."""
        if not self.stack:
            return _find_fault(self.fault)
        ours = [frame for frame in self.stack if any(part in frame.file for part in OURS)]
        starts = ("runpy.py", "paralab/__main__.py")
        others = [f for f in self.stack if f not in ours and not f.file.endswith(starts)]
        own = [frame for frame in others if not frame.is_library]
        frame = (own or ours or self.stack)[-1]
        return f"{frame.file}:{frame.line} in {frame.function}: {frame.code}"

    @property
    def kind(self) -> str | None:
        """The collective on the main thread's stack. (gloo records some other collectives as
        all_reduce.)"""
        for frame in reversed(self.stack):
            in_torch = "torch/distributed" in frame.file.replace("\\", "/")
            if in_torch and (kind := matching.kind_of(frame.function)):
                return kind
            if not frame.is_library:
                return None  # the frames that follow are only callers
        return None

    @property
    def waits_in(self) -> CollectiveCall | None:
        """The collective that this rank has started but not finished."""
        unfinished = [call for call in self.collectives if call.is_open]
        if unfinished and _is_waiting(self.stack):
            return unfinished[-1]
        return CollectiveCall(self.kind, None, is_open=True) if self.kind else None

    @property
    def calls(self) -> list[CollectiveCall]:
        """The calls so far. If the rank waits in a call, that call is last, as the stack shows it."""
        waits_in = self.waits_in
        # Sends and receives have no number, so only the stack shows them.
        numbered = [call for call in self.collectives if call.number is not None]
        if waits_in is None:
            return [replace(call, is_open=False) for call in numbered]
        numbered = [call for call in numbered if call is not waits_in]
        site = self.where if self.kind and waits_in.number is not None else None
        return [*numbered, replace(waits_in, site=site, where=self.where, record=self.kind)]


def _is_waiting(stack: list[Frame]) -> bool:
    """Return whether the main thread is in torch.distributed, or in autograd waiting for DDP."""
    waits = ("wait", "_engine_run_backward", "synchronize", "barrier")
    return any("distributed" in frame.file or frame.function in waits for frame in stack[-3:])


def _find_fault(fault: str) -> str | None:
    """Return the main thread's innermost line. The main thread is last, its innermost call first."""
    main = fault.rpartition("hread")[2].splitlines()[1:]
    lines = [line.strip() for line in main if line.strip().startswith("File ")]
    own = [line for line in lines if not any(part in line for part in (*LIBRARIES, *OURS))]
    return next(iter(own or lines), None)


def _read_object(path: Path) -> JsonObject:
    """Read a JSON object, or return `{}` if the rank died before it was written."""
    return parse_object(path.read_bytes()) if path.exists() else {}


def _convert(answer: JsonObject) -> tuple[list[Frame], list[CollectiveCall]]:
    """Convert an answer. Ignore anything unexpected: torch's format is private."""
    stack: list[Frame] = []
    collectives: list[CollectiveCall] = []
    try:
        stack = msgspec.convert((answer.get("stacks") or {}).get("MainThread", []), list[Frame])
        collectives = matching.from_flight_recorder(answer.get("collectives") or [])
    except (msgspec.ValidationError, AttributeError, KeyError, TypeError, ValueError):
        pass
    return stack, collectives
