"""Create the document for any paralab folder: a run, a comparison, a search, a sheet, …"""

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from paralab.analyse import scaling, tune
from paralab.analyse.blocks import Document
from paralab.analyse.compare import comparison_of, comparison_of_runs
from paralab.analyse.manifest import kind_of
from paralab.analyse.report import report
from paralab.analyse.verdict import verdict
from paralab.course import practical
from paralab.errors import UsageError
from paralab.show import verify


def document_of(folder: Path) -> Document:
    """Return the document for one folder, computed from its events."""
    kind = kind_of(folder)
    if kind not in DOCUMENTS:
        problem = f"This paralab version cannot read {folder}: its kind is {kind!r}."
        raise UsageError(problem, fix="install a newer paralab")
    return DOCUMENTS[kind](folder)


def document_of_runs(folders: Sequence[Path]) -> Document:
    """Return a document that shows individual runs side by side."""
    return report(comparison_of_runs(folders), Path())


def _scale(folder: Path) -> Document:
    comparison = comparison_of(folder)
    document = report(comparison, folder, [scaling.section(comparison)])
    general = [each for each in verdict(comparison) if each.kind in ("same", "warning")]
    return replace(document, findings=(*scaling.findings(comparison), *general))


def _slurm(folder: Path) -> Document:
    """Open the last attempt of a Slurm job, because a requeued job trains again."""
    manifests = list(folder.glob("run-*/manifest.json"))
    if not manifests:
        fix = f"read {folder}/slurm-*.out, or submit it: sbatch {folder}/job.sbatch"
        raise UsageError(f"The Slurm job in {folder} has not started training yet.", fix)
    newest = max(manifests, key=lambda path: (path.stat().st_mtime, path))
    return document_of_runs([newest.parent])


DOCUMENTS: dict[str, Callable[[Path], Document]] = {
    "run": lambda folder: document_of_runs([folder]),
    "compare": lambda folder: report(comparison_of(folder), folder),
    "scale": _scale,
    "tune": tune.document,
    "verify": verify.document_of,
    "slurm": _slurm,
    "practical": practical.document_of,
}
