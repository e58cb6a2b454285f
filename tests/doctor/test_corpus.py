"""Every mistake in the corpus has a healthy twin, names the ways that find it, and marks a line."""

import pytest

from tests.doctor.cases import WAYS, broken, cases, healthy

WRONG = [case for case in cases() if not case.name.startswith("healthy")]


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_a_mistake_says_who_finds_it_and_where(case):
    assert case.ways, f"{case.script}: the first line must be '# ways: …'"
    assert set(case.ways) <= set(WAYS)
    assert all(mark.way is None or mark.way in case.ways for mark in case.marks)
    if "script" in case.ways:
        assert case.entry in {id for id, _, _ in case.expected("script")}, (
            "a static finding has a line"
        )
    assert "paralab" not in case.script.read_text(), "a script of the corpus knows nothing of us"


@pytest.mark.parametrize("case", healthy(), ids=str)
def test_a_twin_has_no_marks(case):
    assert not case.ways
    assert not case.marks
    compile(case.script.read_text(), str(case.script), "exec")


def test_every_entry_has_a_mistake_and_a_twin():
    names = {
        entry: {case.name for case in cases() if case.entry == entry}
        for entry in {case.entry for case in cases()}
    }
    assert all({"broken", "healthy"} <= found for found in names.values()), names
    assert broken("script")
