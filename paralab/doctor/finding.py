"""What the doctor says: findings, each with its place, its reason here and its evidence."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "suspect"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "suspect")


@dataclass(frozen=True)
class Edit:
    """Lines `first`..`last` of a file (from 1, both included) become `lines`. An insertion before
    line n: first=n, last=n-1."""

    file: str
    first: int
    last: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """`error`: it is so. `warning`: it is so, and costs time or quality, not correctness.
    `suspect`: it may be so, and `why` says what would make it certain."""

    id: str
    severity: Severity
    why: str  # why it is wrong here, in a sentence or two, with the names and numbers of this case
    fix: str  # what to write instead, here
    file: str | None = None
    line: int | None = None
    rank: int | None = None  # the culprit, never its victim
    evidence: tuple[str, ...] = ()  # what was seen: lines of code, of a log, measured numbers
    gain: float | None = None  # the share of the step that the fix would save
    edits: tuple[Edit, ...] = field(default=(), compare=False)  # the fix, where it is safe

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Looked:
    """One thing that was looked at, also where all is well. `value`: what was seen, or why nothing
    was. `findings`: their ids."""

    name: str
    value: str | None
    verdict: str  # good, not looked at, not set, or what was found: "suspect L11"
    findings: tuple[str, ...] = ()


def ordered(findings: list[Finding]) -> list[Finding]:
    """The most certain first; among those the one that gains most; then by place."""
    place = {severity: number for number, severity in enumerate(SEVERITIES)}
    return sorted(
        findings, key=lambda f: (place[f.severity], -(f.gain or 0), f.file or "", f.line or 0, f.id)
    )
