"""The corpus on observed ranks, except hangs (test_ranks.py). The doctor reports each mistake with
its id, line, and culprit, and no other error. In the healthy twin, it reports no error and does
not find the mistake."""

import pytest

from paralab.doctor.catalog import apply, checked_ids
from paralab.doctor.observation import Observation
from tests.doctor.cases import CORPUS, Case, broken, healthy
from tests.doctor.moments import moments
from tests.doctor.ranks import STARTS, observe_all
from tests.doctor.test_log_corpus import WRONG as PRINTED
from tests.doctor.test_log_corpus import assert_told

pytestmark = pytest.mark.processes
AT_A_TIME = 3
COVERED = checked_ids("ranks") | checked_ids("log")  # an exception on a rank is read like a log
RUN = [
    case for case in [*broken("ranks"), *healthy()] if case.entry[0] != "H" and case.start in STARTS
]
WRONG = [case for case in RUN if case.ways]
# Twins that need a GPU are not run, because their scripts are only read.
HEALTHY = [case for case in RUN if not case.ways and case.entry in {wrong.entry for wrong in WRONG}]
# Correct scripts by experts, including code that looks like a mistake.
IN_ORDER = [
    Case("none", script.stem, script, (), ())
    for script in sorted((CORPUS.parent / "healthy_ranks").glob("*.py"))
]


@pytest.fixture(scope="module")
def seen(request, tmp_path_factory):
    """Return the findings in each requested case."""
    root = tmp_path_factory.mktemp("seen")  # once: several threads would fight for a number
    return observe_all(request, root, AT_A_TIME, stall_seconds=30)


def describe(findings):
    return (
        "\n".join(
            f"{f.id} {f.severity} {f.file}:{f.line} rank {f.rank}: {f.why} {f.evidence}"
            for f in findings
        )
        or "nothing"
    )


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_the_mistake_is_found_and_nothing_else_is_an_error(case, seen):
    assert case.entry in COVERED, "the first line of the script promises a rule"
    result = seen[str(case)]
    own = [finding for finding in result.findings if finding.id == case.entry]
    assert own, describe(result.findings) + str(result.notes)
    for mark in case.marks:
        if mark.way in (None, "ranks"):
            assert any(
                (f.file, f.line) == (str(mark.file), mark.line) and mark.rank in (None, f.rank)
                for f in own
            ), describe(own)
    others = [
        finding
        for finding in result.findings
        if finding.severity == "error" and finding.id != case.entry
    ]
    assert not others, describe(others)
    assert all(finding.why and finding.fix and finding.evidence for finding in own)
    assert not result.notes


@pytest.mark.parametrize("case", [case for case in WRONG if case in PRINTED], ids=str)
def test_what_it_printed_tells_the_mistake(case, seen):
    assert_told(case, sorted(seen[str(case)].folder.glob("rank*.txt")))


@pytest.mark.parametrize("case", HEALTHY, ids=str)
def test_the_twin_is_healthy(case, seen):
    result = seen[str(case)]
    accused = [
        finding
        for finding in result.findings
        if finding.severity == "error" or finding.id == case.entry
    ]
    assert not accused, describe(accused)
    assert not result.notes
    assert result.exit_code == 0


@pytest.mark.parametrize("case", IN_ORDER, ids=str)
def test_what_is_in_order_is_not_accused(case, seen):
    """Ignore findings about waiting (W…), which occur on a busy machine."""
    result = seen[str(case)]
    assert not [finding for finding in result.findings if finding.id[0] != "W"], describe(
        result.findings
    )
    assert not result.notes
    assert result.exit_code == 0


@pytest.mark.parametrize("case", WRONG + HEALTHY + IN_ORDER, ids=str)
def test_whenever_the_ranks_are_read_nothing_else_is_an_error(case, seen):
    """While the ranks run, the doctor must not report what the next event explains."""
    result = seen[str(case)]
    whole = Observation.read(result.folder)
    for moment in moments(whole, 12, str(case)):
        accused = [
            f
            for f in apply("ranks", moment)
            if f.severity == "error" and f.id not in {own.id for own in result.findings}
        ]
        assert not accused, describe(accused) + str([rank.events[-1] for rank in moment.ranks])


def test_every_entry_that_has_a_case_is_here():
    assert {case.entry for case in WRONG} <= {path.name for path in CORPUS.iterdir()}
    assert len({case.entry for case in WRONG}) >= 40
