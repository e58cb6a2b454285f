"""Create the document for any paralab folder: a run, a comparison, a scaling experiment, a search,
a sheet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from paralab.analyse import scaling, tune
from paralab.analyse.blocks import Cell, Document, Finding, Section, Table
from paralab.analyse.compare import comparison_of, comparison_of_runs
from paralab.analyse.manifest import kind_of
from paralab.analyse.report import report
from paralab.analyse.verdict import verdict
from paralab.analyse.verify import (
    Verified,
    VerifyResult,
    headline,
    outcome,
    size_of,
    skipped_by_reason,
)
from paralab.course import practical
from paralab.errors import UsageError
from paralab.record.types import convert, read_object


def document_of(folder: Path) -> Document:
    """Return the document for one folder, computed from its events."""
    kind = kind_of(folder)
    if kind == "run":
        return document_of_runs([folder])
    if kind not in DOCUMENTS:
        raise UsageError(
            f"This paralab version cannot read {folder}: its kind is {kind!r}.",
            fix="install a newer paralab",
        )
    return DOCUMENTS[kind](folder)


def document_of_runs(folders: Sequence[Path]) -> Document:
    """Return a document that shows individual runs side by side."""
    return report(comparison_of_runs(folders), Path())


def _compare(folder: Path) -> Document:
    return report(comparison_of(folder), folder)


def _scale(folder: Path) -> Document:
    comparison = comparison_of(folder)
    own = scaling.findings(comparison)
    document = report(comparison, folder, [scaling.section(comparison)])
    return replace(
        document,
        findings=(
            *own,
            *(finding for finding in verdict(comparison) if finding.kind in ("same", "warning")),
        ),
    )


def _tune(folder: Path) -> Document:
    return tune.document(folder)


def _verify(folder: Path) -> Document:
    """Create the document for `verify` from its result."""
    path = folder / "result.json"
    if not path.exists():
        raise UsageError(f"verify in {folder} did not finish.", fix="run paralab verify again")
    result = convert(read_object(path), VerifyResult, path)
    columns = ("workload", "strategy", "batch", "difference", "outcome", "as requested", "why")
    table = Table("", columns, tuple(_verify_row(each) for each in result.configurations))
    evidence = {
        "equal": sum(each.equal for each in result.configurations),
        "of": len(result.configurations),
        "skipped": len(result.skipped),
    }
    sections = [Section("Configurations", (table,))]
    if result.skipped:
        rows = tuple(
            tuple(Cell(str(value), value) for value in row) for row in skipped_by_reason(result)
        )
        skipped = Table("", ("strategy", "configurations", "why"), rows)
        sections.append(Section("Not run", (skipped,)))
    return Document(
        "Verify: parallel equals serial",
        ", ".join(result.workloads),
        (Finding("same", headline(result), evidence),),
        tuple(sections),
    )


def _verify_row(each: Verified) -> tuple[Cell, ...]:
    names = (each.options.workload, each.strategy, each.arithmetic)
    asked = each.excused.max_difference if each.excused else None
    why = each.cause or "; ".join(each.excused.reasons if each.excused else []) or "–"
    return (
        *(Cell(name, name) for name in names),
        Cell(size_of(each.max_difference), each.max_difference),
        Cell(outcome(each), each.equal),
        Cell(size_of(asked), asked),
        Cell(why, why),
    )


def _slurm(folder: Path) -> Document:
    """Open the last attempt of a Slurm job: a requeued job trains again."""
    runs = [
        (manifest.stat().st_mtime, manifest.parent)
        for manifest in folder.glob("run-*/manifest.json")
    ]
    if not runs:
        raise UsageError(
            f"The Slurm job in {folder} has not trained yet.",
            fix=f"read {folder}/slurm-*.out, or submit it: sbatch {folder}/job.sbatch",
        )
    return document_of_runs([max(runs)[1]])


DOCUMENTS: dict[str, Callable[[Path], Document]] = {
    "compare": _compare,
    "scale": _scale,
    "tune": _tune,
    "verify": _verify,
    "slurm": _slurm,
    "practical": practical.document_of,
}
