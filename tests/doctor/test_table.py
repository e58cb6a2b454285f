"""The table in docs/doctor.md matches the corpus. Observing ranks takes minutes, so this checks
only a minimum for those columns."""

import re

from paralab.doctor.catalog import ENTRIES
from tests.doctor.cases import broken
from tests.doctor.table import BEGIN, END, PAGE, STARTS, in_logs, in_scripts


def rows():
    shown = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in shown.splitlines()
        if line.startswith("| [")
    ]
    return {re.match(r"\[(\w+)\]", cells[0])[1]: cells for cells in lines}


def column(number):
    return {id_ for id_, cells in rows().items() if cells[number] == "yes"}


def test_every_entry_has_a_row():
    assert list(rows()) == list(ENTRIES)


def test_what_is_read_is_what_the_page_says():
    assert column(2) == in_scripts()
    assert column(5) == in_logs() & set(ENTRIES)


def test_the_bars():
    told = {id_ for id_ in column(2) | column(3) | column(4) if id_[0] not in "WM"}
    assert len(told) >= 60
    assert len([id_ for id_ in told if ENTRIES[id_].silent]) >= 25


def test_what_the_corpus_finds_on_ranks_is_on_the_page():
    """The page once said that only reading a script finds G03. test_rank_corpus.py and
    test_ranks.py run these cases."""
    cases = [case for case in broken("ranks") if case.name == "broken" and case.start in STARTS]
    undecided = {"H13"}  # its healthy twin waits too, but not as long
    assert {case.entry for case in cases} - undecided == column(4)
