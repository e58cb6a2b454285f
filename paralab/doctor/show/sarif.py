"""Write a diagnosis as SARIF 2.1.0, which code hosts show beside the lines of a change."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paralab import __version__
from paralab.doctor.catalog import ENTRIES
from paralab.doctor.patch import diff, shown_path
from paralab.doctor.registry import Edit, Finding
from paralab.doctor.report import Diagnosis
from paralab.doctor.show.entry import page
from paralab.doctor.sources import Sources
from paralab.doctor.suppressions import Ignored

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
FINGERPRINT = "primaryLocationLineHash"  # the key by which code hosts identify a result
LEVELS = {"error": "error", "warning": "warning", "suspect": "note"}
PRECISIONS = {"error": "very-high", "warning": "high", "suspect": "medium"}


def as_sarif(diagnosis: Diagnosis) -> dict[str, Any]:
    every: list[tuple[Finding, Ignored | None]]
    every = [(finding, None) for finding in diagnosis.findings]
    every += [(each.finding, each) for each in diagnosis.ignored]
    ids = sorted({finding.id for finding, _ in every}, key=lambda id: list(ENTRIES).index(id))
    results = [
        _result(finding, ignored, ids.index(finding.id), diagnosis) for finding, ignored in every
    ]
    _number_equal_lines(results)
    driver = {
        "name": "paralab doctor",
        "semanticVersion": __version__,
        "rules": [_rule(id, [finding for finding, _ in every]) for id in ids],
    }
    notes = [{"level": "note", "message": {"text": note}} for note in diagnosis.notes]
    notes += [{"level": "error", "message": {"text": str(each)}} for each in diagnosis.failures]
    run = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notes}],
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {"checked": diagnosis.checked, "notChecked": diagnosis.not_checked},
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(id: str, findings: list[Finding]) -> dict[str, Any]:
    entry = ENTRIES[id]
    severities = {finding.severity for finding in findings if finding.id == id}
    worst = next(severity for severity in LEVELS if severity in severities)
    return {
        "id": id,
        "shortDescription": {"text": entry.title},
        "fullDescription": {"text": f"{entry.cause} {entry.fix}"},
        "help": {"text": f"{entry.symptom}\n{entry.cause}\n{entry.fix}", "markdown": page(entry)},
        "defaultConfiguration": {"level": LEVELS[worst]},
        "properties": {"precision": PRECISIONS[worst], "tags": ["parallel-training"]},
    }


def _result(
    finding: Finding, ignored: Ignored | None, index: int, diagnosis: Diagnosis
) -> dict[str, Any]:
    rank = f" (rank {finding.rank})" if finding.rank is not None else ""
    evidence = "".join(f"\n- {each}" for each in finding.evidence)
    result: dict[str, Any] = {
        "ruleId": finding.id,
        "ruleIndex": index,
        "level": LEVELS[finding.severity],
        "message": {"text": f"{finding.why}{rank} Fix: {finding.fix}{evidence}"},
        "locations": _locations(finding, diagnosis),
        "partialFingerprints": {FINGERPRINT: _fingerprint(finding, diagnosis.sources)},
        "properties": {"severity": finding.severity, "rank": finding.rank, "gain": finding.gain},
    }
    if finding.edits and diff(finding.edits, diagnosis.sources):
        result["fixes"] = [_fix(finding, diagnosis.sources)]
    if ignored is not None:
        kind = "inSource" if ignored.by == "comment" else "external"
        result["suppressions"] = [{"kind": kind, "justification": ignored.reason}]
    return result


def _locations(finding: Finding, diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Return the place, or the top of the file: code hosts drop results without a place."""
    file = finding.file or (diagnosis.subject if Path(diagnosis.subject).is_file() else None)
    if not file:
        return []
    region: dict[str, Any] = {"startLine": finding.line or 1}
    line = diagnosis.sources.line(finding.file, finding.line)
    if line is not None:
        region["snippet"] = {"text": line}
    return [{"physicalLocation": {"artifactLocation": _artifact(file), "region": region}}]


def _artifact(file: str) -> dict[str, str]:
    shown = shown_path(file)
    if Path(shown).is_absolute():
        return {"uri": Path(shown).as_uri()}
    return {"uri": quote(shown), "uriBaseId": "%SRCROOT%"}


def _fingerprint(finding: Finding, sources: Sources) -> str:
    """Return a hash that stays the same when the line moves, as long as its text is the same."""
    line = (sources.line(finding.file, finding.line) or "").strip()
    return hashlib.sha256(
        f"{finding.id}\0{finding.file and shown_path(finding.file)}\0{line}".encode()
    ).hexdigest()[:32]


def _number_equal_lines(results: list[dict[str, Any]]) -> None:
    """Number identical lines of a file: code hosts merge results with equal fingerprints."""
    numbers: Counter[str] = Counter()
    for result in results:
        line = result["partialFingerprints"][FINGERPRINT]
        numbers[line] += 1
        result["partialFingerprints"][FINGERPRINT] = f"{line}:{numbers[line]}"


def _fix(finding: Finding, sources: Sources) -> dict[str, Any]:
    files = dict.fromkeys(edit.file for edit in finding.edits)
    changes = [
        {
            "artifactLocation": _artifact(file),
            "replacements": [
                _replacement(edit, sources.lines(file))
                for edit in finding.edits
                if edit.file == file
            ],
        }
        for file in files
    ]
    return {"description": {"text": finding.fix}, "artifactChanges": changes}


def _replacement(edit: Edit, lines: list[str]) -> dict[str, Any]:
    """Convert an edit. An insertion is an empty region. A replacement ends before its last line's
    newline, because the file may end there."""
    replaces = bool(edit.lines) and edit.first <= edit.last
    end, column = (edit.last, len(lines[edit.last - 1]) + 1) if replaces else (edit.last + 1, 1)
    text = "\n".join(edit.lines) + ("\n" if edit.lines and not replaces else "")
    region = {"startLine": edit.first, "startColumn": 1, "endLine": end, "endColumn": column}
    return {"deletedRegion": region} | ({"insertedContent": {"text": text}} if text else {})
