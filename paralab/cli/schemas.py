"""The types of all `--json` outputs; docs/schema/ has them as JSON Schema."""

from __future__ import annotations

from typing import Any

import msgspec

from paralab.analyse.blocks import Document
from paralab.analyse.compare import Comparison
from paralab.analyse.result import Result
from paralab.analyse.tune import TuneResult
from paralab.analyse.verify import VerifyResult
from paralab.course.class_report import ClassReport
from paralab.plan.plan import Plan
from paralab.record.types import JsonObject, Record
from paralab.show.facts import Catalog, Environment


class ErrorReport(Record, frozen=True, kw_only=True):
    """The output of any command that fails; the exit code is 1, or 2 for a usage error."""

    error: str
    detail: str | None
    fix: str | None


class SavedCheckpoint(Record, frozen=True, kw_only=True):
    path: str
    step: int
    bytes: int
    problem: str | None  # None if complete
    manifest: JsonObject  # as saved, without the list of files


class CheckpointList(Record, frozen=True, kw_only=True):
    folder: str
    checked: bool  # the checksums were checked
    checkpoints: list[SavedCheckpoint]


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
    "practical": Document,
    "practical check": ClassReport,
    "checkpoint list": CheckpointList,
    "checkpoint verify": CheckpointList,
    "env": Environment,
    "list": Catalog,
    "error": ErrorReport,
}


def schema_of(output: str) -> JsonObject:
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


def file_name(output: str) -> str:
    """`practical check` -> `practical-check.json`."""
    words = [word.lstrip("-") for word in output.split()]
    return "-".join(words) + ".json"
