"""Any folder that paralab has made -> the document that tells it: a run, a comparison, a scaling, a
tuning, a sheet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paralab.analyse import scaling, tune
from paralab.analyse.blocks import Cell, Document, Finding, Section, Table
from paralab.analyse.compare import comparison_of, comparison_of_runs, read_manifest
from paralab.analyse.report import report
from paralab.analyse.verdict import verdict
from paralab.analyse.verify_summary import headline, left_out, size_of, verdict_of
from paralab.course import sheet
from paralab.errors import UsageError


def document_of(folder: Path) -> Document:
    """The document of one folder, computed anew from what was recorded."""
    kind = read_manifest(folder).get("kind", "run")
    if kind == "run":
        return document_of_runs([folder])
    if kind not in DOCUMENTS:
        raise UsageError(
            f"{folder} is of a kind that this paralab does not know: {kind!r}.",
            fix="a newer paralab",
        )
    document: Document = DOCUMENTS[kind](folder)
    return document


def document_of_runs(folders: Sequence[Path]) -> Document:
    """Runs that were made one by one, side by side. The paths of the runs are their own."""
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
    """The cases of a proof, from its result."""
    try:
        proof = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The proof in {folder} did not come to its end: {error}.", fix="paralab verify again"
        ) from error
    rows = []
    for case in proof["cases"]:
        difference, excused = case["max_difference"], case.get("excused")
        cells = (case["options"]["workload"], case["strategy"], case["arithmetic"])
        told = [
            Cell(size_of(value), value)
            for value in (difference, excused and excused["max_difference"])
        ]
        words = [Cell(text, text) for text in cells]
        why = case["cause"] or "; ".join(excused["reasons"] if excused else []) or "–"
        rows.append(
            (*words, told[0], Cell(verdict_of(case), case["equal"]), told[1], Cell(why, why))
        )
    text = headline(proof)
    table = Table(
        "",
        ("workload", "strategy", "batch", "difference", "verdict", "as asked", "why"),
        tuple(rows),
    )
    equal = sum(case["equal"] for case in proof["cases"])
    findings = (
        Finding("same", text, {"equal": equal, "of": len(rows), "skipped": len(proof["skipped"])}),
    )
    left = Table(
        "",
        ("strategy", "cases", "why"),
        tuple(tuple(Cell(str(v), v) for v in row) for row in left_out(proof)),
    )
    sections = (
        Section("Cases", (table,)),
        *([Section("Not run", (left,))] if proof["skipped"] else []),
    )
    return Document(
        "Proof: parallel equals serial", ", ".join(proof["workloads"]), findings, sections
    )


def _slurm(folder: Path) -> Document:
    """Of a Slurm job: its last start, since one that was requeued has trained again."""
    runs = [
        (manifest.stat().st_mtime, manifest.parent)
        for manifest in folder.glob("run-*/manifest.json")
    ]
    if not runs:
        raise UsageError(
            f"The Slurm job of {folder} has not trained.",
            fix=f"read {folder}/slurm-*.out, or submit it: sbatch {folder}/job.sbatch",
        )
    return document_of_runs([max(runs)[1]])


DOCUMENTS: dict[str, Any] = {
    "compare": _compare,
    "scale": _scale,
    "tune": _tune,
    "verify": _verify,
    "slurm": _slurm,
    "practical": sheet.document_of,
}
