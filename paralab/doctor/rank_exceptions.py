"""Explain exceptions of watched ranks that no check explains: read their tracebacks like a log."""

import re
from collections.abc import Sequence
from dataclasses import replace

from paralab.doctor.catalog import apply
from paralab.doctor.failures.hangs.failed_ranks import needs_missing_gpu
from paralab.doctor.logs.reading import read_texts
from paralab.doctor.messages import find_message
from paralab.doctor.observation import Observation
from paralab.doctor.registry import Finding

UNEXPLAINED = "H11"
NO_BACKEND = "L05"
LINE = re.compile(r"^(rank \d+):\d+: ")


def with_exceptions_explained(findings: Sequence[Finding], seen: Observation) -> list[Finding]:
    """Replace the finding that reports the exception with the catalog's explanation."""
    raised = [(rank, rank.raised) for rank in seen.ranks if rank.raised and rank.raised.text]
    explained = any(f.severity == "error" and f.id != UNEXPLAINED for f in findings)
    if explained or not raised:
        return list(findings)
    for rank, exception in raised:
        message = find_message(exception.text)
        if needs_missing_gpu(rank) and (message is None or message.entry.id != NO_BACKEND):
            return list(findings)
    raised.sort(key=lambda pair: pair[1].t)
    logs = read_texts({rank.rank: exception.text for rank, exception in raised})
    found = apply("log", logs)
    more = [
        replace(f, evidence=tuple(LINE.sub(r"\1: ", text) for text in f.evidence)) for f in found
    ]
    known = [finding for finding in more if finding.id != UNEXPLAINED]
    if any(finding.severity == "error" for finding in known):
        return [*known, *(finding for finding in findings if finding.id != UNEXPLAINED)]
    if any(finding.id == UNEXPLAINED for finding in findings):
        return list(findings)
    # An ordinary exception is not a parallel failure, but the user should see it first.
    return [*(finding for finding in more if finding.severity == "error"), *findings]
