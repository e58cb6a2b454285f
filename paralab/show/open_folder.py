"""Create the document for any paralab folder: a run, a comparison, a scaling experiment, a search,
or a sheet."""

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
    if kind not in DOCUMENTS:
        raise UsageError(
            f"This paralab version cannot read {folder}: its kind is {kind!r}.",
            fix="install a newer paralab",
        )
    return DOCUMENTS[kind](folder)


def document_of_runs(folders: Sequence[Path]) -> Document:
    """Return a document that shows individual runs side by side."""
    return report(comparison_of_runs(folders), Path())


def _scale(folder: Path) -> Document:
    comparison = comparison_of(folder)
    document = report(comparison, folder, [scaling.section(comparison)])
    general = [each for each in verdict(comparison) if each.kind in ("same", "warning")]
    return replace(document, findings=(*scaling.findings(comparison), *general))


def _verify(folder: Path) -> Document:
    """Create the document for `verify` from its result."""
    path = folder / "result.json"
    if not path.exists():
        raise UsageError(f"verify in {folder} did not finish.", fix="run paralab verify again")
    result = convert(read_object(path), VerifyResult, path)
    columns = ("workload", "strategy", "batch", "difference", "outcome", "as requested", "why")
    table = Table("", columns, tuple(_verify_row(each) for each in result.configurations))
    equal, total = sum(each.equal for each in result.configurations), len(result.configurations)
    evidence = {"equal": equal, "of": total, "skipped": len(result.skipped)}
    finding = Finding("same", headline(result), evidence)

    sections = [Section("Configurations", (table,))]
    reasons = skipped_by_reason(result)
    if reasons:
        rows = tuple(tuple(Cell(str(value), value) for value in row) for row in reasons)
        skipped = Table("", ("strategy", "configurations", "why"), rows)
        sections.append(Section("Not run", (skipped,)))
    title, subtitle = "Verify: parallel equals serial", ", ".join(result.workloads)
    return Document(title, subtitle, (finding,), tuple(sections))


def _verify_row(each: Verified) -> tuple[Cell, ...]:
    names = (each.options.workload, each.strategy, each.arithmetic)
    difference = each.max_difference
    asked = each.excused.max_difference if each.excused else None
    why = each.cause or "; ".join(each.excused.reasons if each.excused else []) or "–"
    return (
        *(Cell(name, name) for name in names),
        Cell(size_of(difference), difference),
        Cell(outcome(each), each.equal),
        Cell(size_of(asked), asked),
        Cell(why, why),
    )


def _slurm(folder: Path) -> Document:
    """Open the last attempt of a Slurm job, because a requeued job trains again."""
    manifests = list(folder.glob("run-*/manifest.json"))
    if not manifests:
        raise UsageError(
            f"The Slurm job in {folder} has not started training yet.",
            fix=f"read {folder}/slurm-*.out, or submit it: sbatch {folder}/job.sbatch",
        )
    newest = max(manifests, key=lambda path: (path.stat().st_mtime, path))
    return document_of_runs([newest.parent])


DOCUMENTS: dict[str, Callable[[Path], Document]] = {
    "run": lambda folder: document_of_runs([folder]),
    "compare": lambda folder: report(comparison_of(folder), folder),
    "scale": _scale,
    "tune": tune.document,
    "verify": _verify,
    "slurm": _slurm,
    "practical": practical.document_of,
}
