"""Any folder that paralab has made -> the document that tells it: a run, a comparison, a scaling, a tuning, a practical."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paralab.analyse import practical, scaling, tuned
from paralab.analyse.blocks import Document
from paralab.analyse.comparison import comparison_of, comparison_of_runs, read_manifest
from paralab.analyse.report import report
from paralab.analyse.verdict import verdict


def document_of(folder: Path) -> Document:
    """The document of one folder, computed anew from what was recorded."""
    kind = read_manifest(folder).get("kind", "run")
    return document_of_runs([folder]) if kind == "run" else DOCUMENTS[kind](folder)


def document_of_runs(folders: Sequence[Path]) -> Document:
    """Runs that were made one by one, side by side. The paths of the runs are their own."""
    return report(comparison_of_runs(folders), Path())


def _compare(folder: Path) -> Document:
    return report(comparison_of(folder), folder)


def _scale(folder: Path) -> Document:
    comparison = comparison_of(folder)
    own = scaling.findings(comparison)
    document = report(comparison, folder, [scaling.section(comparison)])
    return replace(document, findings=(*own, *(finding for finding in verdict(comparison) if finding.kind in ("same", "warning"))))


def _tune(folder: Path) -> Document:
    return tuned.document(folder)


DOCUMENTS: dict[str, Any] = {"compare": _compare, "scale": _scale, "tune": _tune, "practical": practical.document_of}
