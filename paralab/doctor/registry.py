"""What a failure's file registers: its entry in the catalog, and checks for one or more sources.

ENTRY = Entry(id="H03", title=…, …)

@check("H03", source="script")
def partial_collective(script: Script) -> Findings: ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from paralab.doctor.finding import Finding, Severity

# script: doctor.static.script.Script; ranks: doctor.observation; log: doctor.logs;
# run: a run folder, doctor.recorded; machine: doctor.preflight
Findings = Iterator[Finding]
Source = Literal["script", "ranks", "log", "run", "machine"]
Check = Callable[[Any], Iterable[Finding] | Finding | None]
C = TypeVar("C", bound=Check)
REPORT = re.compile(r"([^\s#]*)#(\d+)")
registered: dict[Source, dict[Check, tuple[str, ...]]] = {
    "script": {},
    "ranks": {},
    "log": {},
    "run": {},
    "machine": {},
}

entries: dict[str, Entry] = {}


@dataclass(frozen=True)
class Message:
    """What torch, NCCL, or a launcher prints when a failure happens.

    `why` and `fix` may use the pattern's named groups, {who} ("rank 1"), and {at} (" at train.py:12
    (`loss.backward()`)"). Without `why`, a check of the entry explains the message."""

    pattern: str  # `.` also matches line ends
    why: str = ""
    fix: str = ""  # default: the entry's
    severity: Severity = "error"
    # raised: an exception that ended a process; printed: any line; note: any line of a job that
    # did not fail
    kind: Literal["raised", "printed", "note"] = "raised"
    blames: bool = True  # the rank that prints it caused the failure
    beside: str = ""  # a pattern that some other line of the log must match


@dataclass(frozen=True)
class Entry:
    """One way in which parallel training goes wrong. `example` is a diff from wrong to right code:
    every line begins with "- ", "+ ", or two spaces."""

    id: str
    title: str
    symptom: str  # what the user sees
    cause: str
    fix: str
    example: str
    sources: tuple[str, ...] = ()  # owner/repository#number; see `reports`
    silent: bool = False  # no other tool reports it on a plain PyTorch script
    limits: str | None = None  # what checks cannot detect, and why
    messages: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        entries[self.id] = self

    @property
    def wrong(self) -> str:
        return self._without("+")

    @property
    def right(self) -> str:
        return self._without("-")

    def _without(self, sign: str) -> str:
        lines = self.example.splitlines()
        return "".join(f"{line[2:]}\n" for line in lines if not line.startswith(sign))


def reports(text: str) -> tuple[str, ...]:
    """Expand "a/b#1 #2 c/d#3" to public reports: a/b#1, a/b#2, c/d#3."""
    found: list[str] = []
    for name, number in REPORT.findall(text):
        found.append(f"{name or found[-1].partition('#')[0]}#{number}")
    return tuple(found)


def check(*ids: str, source: Source) -> Callable[[C], C]:
    """Register a check for a source. It may report any of these ids."""

    def register(function: C) -> C:
        registered[source][function] = ids
        return function

    return register
