"""A practical's folder -> its document: every table filled, every question answered from what was
recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from paralab.analyse.blocks import Document, Finding
from paralab.analyse.compare import Comparison, comparison_of
from paralab.analyse.manifest import about_of
from paralab.analyse.phrases import machine_words
from paralab.analyse.report import facts
from paralab.analyse.verdict import verdict
from paralab.course import practical5, practical6, practical7, practical10
from paralab.course.measurements import LabPart, Measurements, sharing, tell
from paralab.errors import UsageError
from paralab.units import plural


@dataclass(frozen=True)
class Told:
    title: str
    parts: tuple[LabPart, ...]


PRACTICALS: Mapping[int, Told] = MappingProxyType(
    {
        5: Told("data parallelism with nn.DataParallel", practical5.PARTS),
        6: Told("DistributedDataParallel and collective communication", practical6.PARTS),
        7: Told("DDP optimisation and debugging", practical7.PARTS),
        10: Told("hybrid parallelism: data, model, pipeline", practical10.PARTS),
    }
)


def find(number: int) -> Told:
    if number not in PRACTICALS:
        raise UsageError(
            f"There is no practical {number}.", fix=f"one of: {', '.join(map(str, PRACTICALS))}"
        )
    return PRACTICALS[number]


def number_of(folder: Path) -> int | None:
    """The practical that a folder is a run of; None where it is something else."""
    return about_of(folder).practical


def document_of(folder: Path) -> Document:
    if number_of(folder) is None:
        raise UsageError(
            f"{folder} is no run of a practical.", fix="a folder that `paralab practical` made"
        )
    return document(comparison_of(folder), folder)


def document(comparison: Comparison, folder: Path) -> Document:
    number = comparison.about.practical or 0
    told = find(number)
    measured = (
        f"{plural(len(comparison.rows), 'set-up')}, {plural(comparison.rounds, 'round')} in turns"
    )
    return Document(
        title=f"Practical {number}: {told.title}",
        subtitle=f"{comparison.workload.name} on {machine_words(comparison)}; {measured}",
        findings=_findings(comparison),
        sections=tell(told.parts, Measurements.of(comparison, folder)),
        facts=facts(comparison),
    )


def _findings(comparison: Comparison) -> tuple[Finding, ...]:
    """Whether it was the same training everywhere, what is missing, and what the timings depend
    on."""
    findings = [finding for finding in verdict(comparison) if finding.kind in ("same", "warning")]
    crowded = [row for row in comparison.rows if sharing(row)]
    if crowded:
        names, cores = [row.name for row in crowded], comparison.machine.cores
        text = (
            f"In {len(crowded)} of {plural(len(comparison.rows), 'set-up')} {sharing(crowded[-1])}."
        )
        findings.append(Finding("limit", text, {"set_ups": names, "cores": cores}))
    return tuple(findings)
