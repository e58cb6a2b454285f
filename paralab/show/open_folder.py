"""Create the document for any paralab folder: a run, a comparison, a search, a sheet, …"""

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from paralab.analyse import scaling, tune, verify
from paralab.analyse.blocks import Cell, Document, Finding, Section
from paralab.analyse.compare import comparison_of, comparison_of_runs
from paralab.analyse.manifest import kind_of
from paralab.analyse.report import report
from paralab.analyse.table_cells import Cells, exact, name, number, table
from paralab.analyse.verdict import verdict
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
    result = convert(read_object(path), verify.VerifyResult, path)
    ran = result.configurations
    evidence = {"equal": sum(each.equal for each in ran), "of": len(ran)}
    evidence["skipped"] = len(result.skipped)
    finding = Finding("same", verify.headline(result), evidence)

    sections = [Section("Configurations", (table("", map(_verify_row, ran)),))]
    if reasons := verify.skipped_by_reason(result):
        skipped = (
            {"strategy": name(names), "configurations": exact(count), "why": name(reason)}
            for names, count, reason in reasons
        )
        sections.append(Section("Not run", (table("", skipped),)))
    title, subtitle = "Verify: parallel equals serial", ", ".join(result.workloads)
    return Document(title, subtitle, (finding,), tuple(sections))


def _verify_row(each: verify.Verified) -> Cells:
    asked = each.excused
    return {
        "workload": name(each.options.workload),
        "strategy": name(each.strategy),
        "batch": name(each.arithmetic),
        "difference": number(each.max_difference, "{:.1e}".format, "–"),
        "outcome": Cell(verify.outcome(each), each.equal),
        "as requested": number(asked.max_difference if asked else None, "{:.1e}".format, "–"),
        "why": name(each.cause or "; ".join(asked.reasons if asked else ()) or "–"),
    }


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
