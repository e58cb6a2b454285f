"""What ranks raised, where no rule of theirs knows it: their tracebacks, read as logs of the job
are."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paralab.doctor.catalog import apply
from paralab.doctor.failures.hangs.failed_ranks import is_for_want_of_a_gpu
from paralab.doctor.finding import Finding
from paralab.doctor.logs.reading import read_logs
from paralab.doctor.observation import Observation

UNEXPLAINED = "H11"  # an exception that no rule knows
SOURCE = re.compile(r"\S*rank(\d+)\.err:\d+: ")


def with_exceptions_explained(findings: Sequence[Finding], seen: Observation) -> list[Finding]:
    """What the logs' rules know of an exception takes the place of the bare word that there was
    one."""
    told = [(rank, rank.raised) for rank in seen.ranks if rank.raised and rank.raised.text]
    told.sort(
        key=lambda pair: pair[1].t
    )  # a file that comes first is the earlier one, where there are no stamps
    known = any(finding.severity == "error" and finding.id != UNEXPLAINED for finding in findings)
    if known or not told or any(is_for_want_of_a_gpu(rank) for rank, _ in told):
        return list(findings)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"rank{rank.rank}.err" for rank, _ in told]
        for path, (_, raised) in zip(paths, told, strict=True):
            path.write_text(raised.text)
        explained = [
            finding for finding in apply("log", read_logs(paths)) if finding.id != UNEXPLAINED
        ]
    if not any(finding.severity == "error" for finding in explained):
        return list(findings)
    kept = [finding for finding in findings if finding.id != UNEXPLAINED]
    return [*kept, *map(_in_ranks_own_words, explained)]


def _in_ranks_own_words(finding: Finding) -> Finding:
    return replace(
        finding, evidence=tuple(SOURCE.sub(r"rank \1: ", line) for line in finding.evidence)
    )
