"""Print one line per finding: `--format concise` for people and editors, `--format github` for
Actions. This needs only the standard library, because the pre-commit hook uses it.
"""

from collections.abc import Callable, Sequence

from paralab.doctor.patch import shown_path
from paralab.doctor.registry import Finding
from paralab.doctor.report import Diagnosis

COMMANDS = {"error": "error", "warning": "warning", "suspect": "notice"}


def shown_findings(diagnosis: Diagnosis, suspects: bool) -> Sequence[Finding]:
    return diagnosis.findings if suspects else diagnosis.certain()


def concise(diagnosis: Diagnosis, suspects: bool) -> list[str]:
    """Return lines like `train.py:41: H03 error dist.barrier() runs …`, sorted by place."""
    by_place = sorted(
        shown_findings(diagnosis, suspects), key=lambda f: (f.file or "", f.line or 0, f.id)
    )
    return [
        f"{_place(each, diagnosis)}: {each.id} {each.severity} {' '.join(each.why.split())}"
        for each in by_place
    ]


def github(diagnosis: Diagnosis, suspects: bool) -> list[str]:
    """Return workflow commands, which GitHub Actions shows beside the changed lines."""
    lines = []
    for finding in shown_findings(diagnosis, suspects):
        title = f"{finding.id} {finding.title}"
        place = ""
        if finding.file:
            place = f"file={_property(shown_path(finding.file))},line={finding.line or 1},"
        message = _escape(f"{finding.why} Fix: {finding.fix}")
        command = COMMANDS[finding.severity]
        lines.append(f"::{command} {place}title={_property(title)}::{message}")
    lines += [f"::warning::{_escape(str(failure))}" for failure in diagnosis.failures]
    return lines


def print_lines(
    diagnosis: Diagnosis, style: str, suspects: bool, echo: Callable[..., None]
) -> None:
    """Print the findings to stdout. Print the summary, and what could not be checked, to stderr."""
    for line in (github if style == "github" else concise)(diagnosis, suspects):
        echo(line)
    for line in (*map(str, diagnosis.failures), *diagnosis.notes, *diagnosis.summary(suspects)):
        echo(line, err=True)


def _place(finding: Finding, diagnosis: Diagnosis) -> str:
    if finding.file:
        return f"{shown_path(finding.file)}:{finding.line or 1}"
    return diagnosis.subject if finding.rank is None else f"rank {finding.rank}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
