"""A diagnosis: what was looked at and what was found, ready to be printed, sent as JSON or as
SARIF."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from paralab.doctor.catalog import ENTRIES
from paralab.doctor.finding import SEVERITIES, Finding, Looked
from paralab.doctor.ignoring import Ignored
from paralab.doctor.patch import diff
from paralab.doctor.registry import Source
from paralab.doctor.sources import Sources
from paralab.units import plural


@dataclass(frozen=True)
class Diagnosis:
    subject: str  # train.py, a command, this machine
    ways: tuple[Source, ...]
    findings: tuple[Finding, ...]  # in the order in which they are told
    looked_at: str  # in words, and what was not: silence must not be taken for more than it is
    not_looked_at: str
    ignored: tuple[Ignored, ...] = ()
    notes: tuple[str, ...] = ()
    facts: tuple[Looked, ...] = ()  # of this machine, also where all is well
    command_exit_code: int | None = None  # of the observed command
    sources: Sources = field(default_factory=Sources, compare=False, repr=False)

    def exit_code(self, strict: bool = False) -> int:
        """0 healthy, 1 not. A suspicion alone makes nobody's build fail, unless that is asked
        for."""
        unhealthy = any(strict or finding.severity != "suspect" for finding in self.findings)
        return int(unhealthy or bool(self.command_exit_code))

    def counted(self) -> str:
        """2 errors, 1 suspect"""
        counts = {
            severity: sum(finding.severity == severity for finding in self.findings)
            for severity in SEVERITIES
        }
        return (
            ", ".join(plural(count, severity) for severity, count in counts.items() if count)
            or "nothing found"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "ways": list(self.ways),
            "findings": [self.finding_json(finding) for finding in self.findings],
            "ignored": [
                {**self.finding_json(each.finding), "reason": each.by.reason}
                for each in self.ignored
            ],
            "notes": list(self.notes),
            "facts": [asdict(fact) for fact in self.facts],
            "looked_at": self.looked_at,
            "not_looked_at": self.not_looked_at,
            "command_exit_code": self.command_exit_code,
        }

    def finding_json(self, finding: Finding) -> dict[str, Any]:
        plain = {name: value for name, value in finding.to_json().items() if name != "edits"}
        known = ENTRIES.get(finding.id)
        return {
            **plain,
            "evidence": list(finding.evidence),
            "title": known.title if known else None,
            "patch": diff(finding.edits, self.sources),
        }
