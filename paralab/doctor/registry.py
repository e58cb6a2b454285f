"""Each failure's file registers an entry in the catalog, and checks for one or more sources.

ENTRY = describe(__doc__, symptom=…, …)

@check("H03", source="script")
def partial_collective(script: Script) -> Findings: ...
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from paralab.doctor.finding import Finding, Severity
from paralab.errors import UsageError

# script: doctor.static.script.Script; ranks: doctor.observation; log: doctor.logs;
# run: a run folder, doctor.recorded; machine: doctor.preflight
Findings = Iterator[Finding]
Source = Literal["script", "ranks", "log", "run", "machine"]
Check = Callable[[Any], Iterable[Finding] | Finding | None]
C = TypeVar("C", bound=Check)
REPORT = re.compile(r"([^\s#]*)#(\d+)")
registered: dict[Source, dict[Check, tuple[str, ...]]] = {way: {} for way in get_args(Source)}

entries: dict[str, "Entry"] = {}


@dataclass(frozen=True)
class Message:
    """What torch, NCCL, or a launcher prints when a failure happens.

    `why` and `fix` may use the pattern's named groups, {who} ("rank 1"), and {at} (" at train.py:12
    (`loss.backward()`)"). Without `why`, one of the entry's checks explains the message."""

    pattern: str  # `.` also matches line ends
    why: str = ""
    fix: str = ""  # if empty, use the entry's fix
    severity: Severity = "error"
    kind: Literal["raised", "printed", "note"] = "raised"
    blames: bool = True  # the rank that prints it caused the failure
    beside: str = ""  # some other line of the log must match this pattern


# A `Message` matches an exception that killed a process, `printed` matches any line, and `note`
# matches any line of a job that did not fail.
printed = partial(Message, kind="printed")
note = partial(Message, kind="note")


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
    sources: tuple[str, ...] = ()  # public reports: owner/repository#number
    silent: bool = False  # no other tool reports it on a plain PyTorch script
    limits: str | None = None  # what the checks cannot detect, and why
    messages: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        assert self.id not in entries, "two entries have the same id"
        entries[self.id] = self


def describe(
    doc: str | None,
    *,
    symptom: str,
    cause: str,
    fix: str,
    example: str,
    sources: str = "",
    silent: bool = False,
    limits: str | None = None,
    messages: tuple[Message, ...] = (),
) -> Entry:
    """Register the entry of a file, whose docstring begins with its id and title. `sources` lists
    public reports: "a/b#1 #2 c/d#3" means a/b#1, a/b#2, and c/d#3."""
    if doc is None:
        raise UsageError("The doctor needs docstrings, which python -OO removes.", fix="python -O")
    id, _, title = " ".join(doc.split()).partition(". ")[0].removesuffix(".").partition(": ")
    found: list[str] = []
    for name, number in REPORT.findall(sources):
        found.append(f"{name or found[-1].partition('#')[0]}#{number}")
    return Entry(id, title, symptom, cause, fix, example, tuple(found), silent, limits, messages)


def check(*ids: str, source: Source) -> Callable[[C], C]:
    """Register a check for a source. It may report any of these ids."""

    def register(function: C) -> C:
        registered[source][function] = ids
        return function

    return register
