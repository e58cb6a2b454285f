"""Write docs/schema/, the JSON Schema of every `--json` output: `python3 tasks.py docs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from paralab.analyse.blocks import Document
from paralab.analyse.compare import Comparison
from paralab.analyse.result import Result
from paralab.analyse.tune import TuneResult
from paralab.analyse.verify import VerifyResult
from paralab.cli.checkpoint import CheckpointList
from paralab.course.class_report import ClassReport
from paralab.doctor.registry import Entry, Failure, MachineFact, Severity, Source
from paralab.plan.plan import Plan
from paralab.record.types import Record
from paralab.serve.served import Served
from paralab.show.facts import Catalog, Environment

FOLDER = Path(__file__).parent / "schema"


class ErrorReport(Record, frozen=True, kw_only=True):
    """The output of any command that fails; the exit code is 1, or 2 for a usage error."""

    error: str
    detail: str | None
    fix: str | None


class Found(Record, frozen=True, kw_only=True):
    """One finding of `paralab doctor`."""

    id: str
    title: str | None
    severity: Severity
    why: str
    fix: str
    file: str | None
    line: int | None
    rank: int | None
    evidence: list[str]
    gain: float | None
    patch: str | None


class Silenced(Found, frozen=True, kw_only=True):
    by: Literal["comment", "per-file-ignores", "baseline"]
    reason: str


class Left(Record, frozen=True, kw_only=True):
    id: str
    file: str | None
    line: int | None
    reason: str


class Fixed(Record, frozen=True, kw_only=True):
    files: dict[str, str]
    ids: list[str]
    left: list[Left]


class DoctorReport(Record, frozen=True, kw_only=True):
    subject: str
    ways: list[Source]
    findings: list[Found]
    ignored: list[Silenced]
    hidden: dict[str, int]
    failures: list[Failure]
    notes: list[str]
    facts: list[MachineFact]
    checked: str
    not_checked: str
    fixed: Fixed | None
    command_exit_code: int | None
    exit_code: int


class Explanation(Record, frozen=True, kw_only=True):
    entries: list[Entry]


class JobScript(Record, frozen=True, kw_only=True):
    script: str


OUTPUTS: dict[str, type] = {
    "run": Result,
    "run --slurm --dry-run": JobScript,
    "plan": Plan,
    "compare": Comparison,
    "scale": Comparison,
    "tune": TuneResult,
    "verify": VerifyResult,
    "show": Document,
    "serve": Served,
    "practical": Document,
    "practical check": ClassReport,
    "checkpoint list": CheckpointList,
    "checkpoint verify": CheckpointList,
    "doctor": DoctorReport,
    "doctor --explain": Explanation,
    "env": Environment,
    "list": Catalog,
    "error": ErrorReport,
}


def pages() -> dict[str, str]:
    """Return file name -> content."""
    return {
        file_name(output): json.dumps(schema_of(output), indent=1, ensure_ascii=False) + "\n"
        for output in OUTPUTS
    }


def file_name(output: str) -> str:
    """`practical check` -> `practical-check.json`."""
    words = [word.lstrip("-") for word in output.split()]
    return "-".join(words) + ".json"


def schema_of(output: str) -> dict[str, Any]:
    """Return the JSON Schema for one output."""
    schema = msgspec.json.schema(OUTPUTS[output])
    title = "an error" if output == "error" else f"`paralab {output} --json`"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **_close(schema),
    }


def _close(schema: Any) -> Any:
    """Return the same schema, but reject fields that it does not list."""
    if isinstance(schema, list):
        return [_close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _close(value) for name, value in schema.items()}
    return closed | {"additionalProperties": False} if "properties" in schema else closed


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    wanted = pages()
    for old in FOLDER.glob("*.json"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(wanted)} schemas in {FOLDER}")


if __name__ == "__main__":
    main()
