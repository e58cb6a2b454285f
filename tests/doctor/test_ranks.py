"""The corpus's hangs and diverging ranks, observed. The doctor reports each mistake that has a
check with its id, line, and culprit, and no error in healthy twins. test_rank_corpus.py has the
other entries."""

import pytest

from paralab.doctor.catalog import checked_ids
from tests.doctor.cases import broken, healthy
from tests.doctor.ranks import observe_all

pytestmark = pytest.mark.processes
AT_A_TIME = 4  # most of them wait
COVERED = checked_ids("ranks")
WRONG = [
    case
    for case in broken("ranks")
    if case.entry[0] == "H" and case.entry in COVERED and case.start == "torchrun"
]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    return observe_all(request, tmp_path_factory.mktemp("seen"), AT_A_TIME)


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_a_mistake_is_found(case, results):
    seen = results[str(case)]
    found = [finding for finding in seen.findings if finding.id == case.entry]
    assert found, f"{seen.findings} {seen.notes}"
    for mark in case.marks:
        if mark.way in (None, "ranks"):
            assert any(
                (finding.file, finding.line) == (str(mark.file), mark.line)
                and mark.rank in (None, finding.rank)
                for finding in found
            ), found
    others = [
        finding
        for finding in seen.findings
        if finding.id[0] == "H" and finding.id != case.entry and finding.severity == "error"
    ]
    assert not others, "a victim is named"


@pytest.mark.parametrize(
    "case",
    [case for case in healthy() if case.entry[0] == "H" and case.start == "torchrun"],
    ids=str,
)
def test_a_healthy_twin_has_no_error(case, results):
    if "from datasets import" in case.script.read_text():
        pytest.importorskip("datasets")
    seen = results[str(case)]
    assert not [finding for finding in seen.findings if finding.severity == "error"]
