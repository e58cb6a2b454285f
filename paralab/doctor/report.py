"""A diagnosis: what was checked and what was found, ready to print or to write as JSON or SARIF."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paralab.doctor.catalog import ENTRIES
from paralab.doctor.patch import diff
from paralab.doctor.registry import SEVERITIES, Failure, Finding, MachineFact, Source
from paralab.doctor.sources import Sources
from paralab.doctor.suppressions import Ignored
from paralab.units import plural


@dataclass(frozen=True)
class Diagnosis:
    subject: str  # what was checked: train.py, a command, this machine
    ways: tuple[Source, ...]
    findings: tuple[Finding, ...]  # most certain first
    checked: str  # a description of what was checked
    not_checked: str  # what was not checked, so that nobody takes "no problems found" as proof
    ignored: tuple[Ignored, ...] = ()
    hidden: Mapping[str, int] = field(default_factory=dict)  # off by default: id -> number
    failures: tuple[Failure, ...] = ()  # what could not be checked
    notes: tuple[str, ...] = ()
    facts: tuple[MachineFact, ...] = ()  # facts about this machine, good or bad
    command_exit_code: int | None = None  # exit code of the watched command
    sources: Sources = field(default_factory=Sources, compare=False, repr=False)

    def exit_code(self, strict: bool = False) -> int:
        """Return 1 for findings, a file that cannot be analyzed, or a failed command; otherwise 0.
        Ignore suspects unless `strict`."""
        findings = any(strict or finding.severity != "suspect" for finding in self.findings)
        unread = any(failure.check is None for failure in self.failures)
        return int(findings or unread or bool(self.command_exit_code))

    def certain(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity != "suspect")

    @property
    def is_undecided_log(self) -> bool:
        """Return whether this is a log without an error. If so, suspects are the best answer."""
        return self.ways == ("log",) and all(each.severity != "error" for each in self.findings)

    def count(self, *severities: str) -> str:
        """Return `2 errors, 1 suspect`, or an empty string."""
        counts = Counter(finding.severity for finding in self.findings)
        wanted = [one for one in SEVERITIES if counts[one] and one in (severities or SEVERITIES)]
        return ", ".join(plural(counts[severity], severity) for severity in wanted)

    def summary(self, suspects_shown: bool) -> list[str]:
        """Return the last lines of the report: the number of findings, and what is not shown."""
        shown = self.count() if suspects_shown else self.count("error", "warning")
        lines = []
        if shown:
            example = self.findings[0].id
            num_files = len({finding.file for finding in self.findings if finding.file})
            where = f" in {num_files} files" if num_files > 1 else ""
            lines.append(f"{shown}{where}. Try: paralab doctor --explain {example}")
        else:
            failed = f"The command ended with exit code {self.command_exit_code}; "
            start = f"{failed}no problems" if self.command_exit_code else "No problems"
            lines.append(f"{start} found {_where(self.subject)}.")
            lines.append(f"Checked: {self.checked}.")
            lines.append(f"Not checked: {self.not_checked}.")
        suspects = self.count("suspect")
        if suspects and not suspects_shown:
            lines.append(f"{suspects}, possible but not confirmed. Try: --suspects")
        for id, number in self.hidden.items():
            title = ENTRIES[id].title
            found = plural(number, f"{id} finding")
            lines.append(f"Off by default: {found} ({title}). Try: --select {id}")
        if self.ignored:
            kinds = {"comment": "comments", "baseline": "the baseline"}
            by = Counter(kinds.get(each.by, each.by) for each in self.ignored)
            words = ", ".join(f"{number} by {kind}" for kind, number in by.items())
            lines.append(f"Silenced: {words}.")
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "ways": list(self.ways),
            "findings": [self.finding_json(finding) for finding in self.findings],
            "ignored": [
                {**self.finding_json(each.finding), "by": each.by, "reason": each.reason}
                for each in self.ignored
            ],
            "hidden": dict(self.hidden),
            "failures": [asdict(failure) for failure in self.failures],
            "notes": list(self.notes),
            "facts": [asdict(fact) for fact in self.facts],
            "checked": self.checked,
            "not_checked": self.not_checked,
            "command_exit_code": self.command_exit_code,
        }

    def finding_json(self, finding: Finding) -> dict[str, Any]:
        given = asdict(replace(finding, edits=()))
        del given["edits"]
        patch = diff(finding.edits, self.sources)
        return {**given, "title": finding.title or None, "patch": patch}


def _where(subject: str) -> str:
    """Return `in train.py`, or `in project/` for `.`."""
    if subject in (".", ".."):
        return f"in {Path(subject).resolve().name}/"
    return f"on {subject}" if subject == "this machine" else f"in {subject}"
