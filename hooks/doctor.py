#!/usr/bin/env python3
"""The pre-commit hook: reads scripts with Python alone, so that nothing (above all not torch) is
installed for it."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 (an older Python must be told, not trip over the syntax)
    sys.exit(f"paralab doctor needs Python 3.11 or newer; this is {sys.version.split()[0]}.")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from paralab.doctor.catalog import ENTRIES
from paralab.doctor.diagnosis import look_at
from paralab.errors import UsageError


def main(words: list[str]) -> int:
    strict = "--strict" in words
    return max((check(Path(word), strict) for word in words if word != "--strict"), default=0)


def check(path: Path, strict: bool) -> int:
    """One file; one that is no Python does not hide what is found in the others."""
    try:
        diagnosis = look_at([path])
    except UsageError as error:
        print(f"paralab doctor: {error}", file=sys.stderr)
        return error.exit_code
    for finding in diagnosis.findings:
        title = ENTRIES[finding.id].title
        print(
            f"{finding.file}:{finding.line}: {finding.severity} {finding.id} {title}. {finding.why} Fix: {finding.fix}"
        )
    for note in diagnosis.notes:
        print(f"note: {note}")
    return diagnosis.exit_code(strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
