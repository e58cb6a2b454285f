"""Hangs of the corpus on observed ranks: each is found with its id, its line and its culprit, and no victim is named.

The other entries are in test_rank_corpus.py.
"""

import pytest

from tests.doctor.cases import broken, healthy
from tests.doctor.ranks import ranks  # noqa: F401

pytestmark = pytest.mark.timeout(90)
WRONG = [case for case in broken("ranks") if case.entry[0] == "H" and case.start == "torchrun"]
ENTRIES = {case.entry for case in WRONG}
HEALTHY = [case for case in healthy() if case.entry in ENTRIES and case.name == "healthy"]


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_a_hang_is_found(case, ranks, tmp_path):  # noqa: F811
    seen = ranks.observed(case.script, folder=tmp_path / "seen")
    found = [finding for finding in seen.findings if finding.id == case.entry]
    assert found, f"{seen.findings} {seen.notes}"
    for mark in case.marks:
        if mark.way in (None, "ranks"):
            assert any((f.file, f.line) == (str(mark.file), mark.line) and mark.rank in (None, f.rank) for f in found), found
    others = [finding for finding in seen.findings if finding.id != case.entry and finding.severity == "error"]
    assert not others, f"a victim is named: {others}"
    assert all(finding.why and finding.fix and finding.evidence for finding in found)


@pytest.mark.parametrize("case", HEALTHY, ids=str)
def test_a_healthy_twin_has_no_error(case, ranks, tmp_path):  # noqa: F811
    seen = ranks.observed(case.script, folder=tmp_path / "seen", stall_seconds=10)
    assert seen.exit_code == 0
    assert not [finding for finding in seen.findings if finding.severity == "error"]
