"""The doctor's findings, each with its place, reason, and evidence."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

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
    fix: str  # what to write instead here
    file: str | None = None
    line: int | None = None
    rank: int | None = None  # the rank at fault, never its victim
    evidence: tuple[str, ...] = ()  # lines of code or of a log, measured numbers
    gain: float | None = None  # the share of the step that the fix would save
    edits: tuple[Edit, ...] = field(default=(), compare=False)  # if the fix is safe

    @property
    def uncertainty(self) -> int:
        return SEVERITIES.index(self.severity)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
