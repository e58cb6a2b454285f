"""Each failure's file registers an entry in the catalog, and checks for one or more sources.

ENTRY = describe(__doc__, Message(…), …)

@check("H03", source="script")
def partial_collective(script: Script) -> Findings: ...

The module's docstring is the entry's text.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from paralab.errors import UsageError

Severity = Literal["error", "warning", "suspect"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "suspect")


@dataclass(frozen=True)
class Edit:
    """Replace lines `first` to `last` of a file (counted from 1, inclusive) with `lines`. To insert
    before line n, use first=n and last=n-1."""

    file: str
    first: int
    last: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """One result of a check. An error is certain and harmful. A warning is certain and costs time
    or quality. A suspect is only possible, and `why` explains what would confirm it."""

    id: str
    severity: Severity
    why: str  # what is wrong here, with names and numbers, in a sentence or two
    fix: str = ""  # what to write instead here; by default, the entry's fix
    file: str | None = None
    line: int | None = None
    rank: int | None = None  # the rank at fault, never its victim
    evidence: tuple[str, ...] = ()  # lines of code or of a log, measured numbers
    gain: float | None = None  # the share of the step that the fix would save
    edits: tuple[Edit, ...] = field(default=(), compare=False)  # if the fix is safe

    def __post_init__(self) -> None:
        if not self.fix and self.id in entries:
            object.__setattr__(self, "fix", entries[self.id].fix)

    @property
    def title(self) -> str:
        return entries[self.id].title if self.id in entries else ""

    @property
    def uncertainty(self) -> int:
        return SEVERITIES.index(self.severity)


@dataclass(frozen=True)
class Failure:
    """Something that could not be checked: a whole file, or one `check` on it."""

    file: str
    reason: str  # a sentence that names the file or the check
    check: str | None = None

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}" if self.check else self.reason


@dataclass(frozen=True)
class MachineFact:
    """One fact about this machine, good or bad. `value` is the measurement, or why there is none.
    `findings` lists the ids of findings about the fact."""

    name: str
    value: str | None
    verdict: str  # good, not checked, not set, or a severity and an id: "suspect L11"
    findings: tuple[str, ...] = ()


def ordered(findings: list[Finding]) -> list[Finding]:
    return sorted(
        findings, key=lambda f: (f.uncertainty, -(f.gain or 0), f.file or "", f.line or 0, f.id)
    )


# script: doctor.static.script.Script; ranks: doctor.observation; log: doctor.logs;
# run: a run folder, doctor.recorded; machine: doctor.preflight
Findings = Iterator[Finding]
Source = Literal["script", "ranks", "log", "run", "machine"]
Check = Callable[[Any], Iterable[Finding] | Finding | None]
C = TypeVar("C", bound=Check)
FIELD = re.compile(r"^(Symptom|Cause|Fix|Limits|Reported): ", re.MULTILINE)
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


def describe(doc: str | None, *messages: Message, silent: bool = False) -> Entry:
    """Register the entry in a file's docstring: its id and title, fields such as `Symptom: …`, and
    an example. `Reported: a/b#1 #2 c/d#3` means a/b#1, a/b#2, and c/d#3."""
    if doc is None:
        raise UsageError("The doctor needs docstrings, which python -OO removes.", fix="python -O")
    head, fields, example = doc.split("\n\n", 2)
    id, _, title = " ".join(head.split()).partition(". ")[0].removesuffix(".").partition(": ")
    _, *parts = FIELD.split(fields)
    texts = {n.lower(): " ".join(t.split()) for n, t in zip(parts[::2], parts[1::2], strict=True)}
    sources: list[str] = []
    for name, number in REPORT.findall(texts.pop("reported", "")):
        sources.append(f"{name or sources[-1].partition('#')[0]}#{number}")
    texts["example"] = example
    return Entry(id, title, **texts, sources=tuple(sources), silent=silent, messages=messages)


def check(*ids: str, source: Source) -> Callable[[C], C]:
    """Register a check for a source. It may report any of these ids."""

    def register(function: C) -> C:
        registered[source][function] = ids
        return function

    return register
