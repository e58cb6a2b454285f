"""The types of all `--json` outputs; docs/schema/ has them as JSON Schema."""

from __future__ import annotations

from paralab.analyse.blocks import Document
from paralab.analyse.compare import Comparison
from paralab.analyse.result import Result
from paralab.analyse.tune import TuneResult
from paralab.analyse.verify import VerifyResult
from paralab.cli.checkpoint import CheckpointList
from paralab.course.class_report import ClassReport
from paralab.plan.plan import Plan
from paralab.record.types import Record
from paralab.show.facts import Catalog, Environment


class ErrorReport(Record, frozen=True, kw_only=True):
    """The output of any command that fails; the exit code is 1, or 2 for a usage error."""

    error: str
    detail: str | None
    fix: str | None


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


def file_name(output: str) -> str:
    """`practical check` -> `practical-check.json`."""
    words = [word.lstrip("-") for word in output.split()]
    return "-".join(words) + ".json"
