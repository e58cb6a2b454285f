"""The catalog's entries are complete, in their groups, and their examples are valid Python."""

import ast
import re
from collections import Counter
from typing import get_args

import pytest

from paralab.doctor.catalog import ENTRIES, GROUPS, checked_ids, entry
from paralab.doctor.registry import Source
from paralab.errors import UsageError

MANY = {"H": 19, "L": 11, "S": 17, "T": 6, "G": 9, "A": 11, "D": 7, "P": 6, "C": 4}
FAILURES = {
    id: known for id, known in ENTRIES.items() if id[0] in MANY
}  # the other entries are about waste and machines


def test_all_ninety_are_there_in_their_groups():
    assert sum(MANY.values()) == len(FAILURES) == 90
    many = Counter(id[0] for id in ENTRIES)
    assert many | MANY == many
    assert list(ENTRIES) == [
        f"{group}{number:02}" for group in GROUPS for number in range(1, many[group] + 1)
    ]
    assert all(id == known.id for id, known in ENTRIES.items())


def test_thirty_four_are_reported_by_no_other_tool():
    assert sum(known.silent for known in FAILURES.values()) == 34


@pytest.mark.parametrize("way", get_args(Source))
def test_every_rule_has_an_entry(way):
    assert checked_ids(way) <= ENTRIES.keys()


def _without(sign: str, example: str) -> str:
    lines = example.splitlines()
    return "".join(f"{line[2:]}\n" for line in lines if not line.startswith(sign))


@pytest.mark.parametrize("known", ENTRIES.values(), ids=lambda known: known.id)
def test_every_entry_is_whole(known):
    wrong, right = (_without(sign, known.example) for sign in "+-")
    for code in (wrong, right):
        ast.parse(code)
        assert code.endswith("\n")
        assert not code.startswith((" ", "\n"))
        assert max(map(len, code.splitlines())) <= 112, "a terminal and a page must hold it"
    assert wrong != right
    for words in (known.symptom, known.cause, known.fix):
        assert words.rstrip("'\"")[-1] in ".`)" or words[-1] in "'\"", words
        assert len(words) > 10
    assert not known.title.endswith(".")
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", source) for source in known.sources)
    assert len(set(known.sources)) == len(known.sources)


def test_an_id_may_be_written_carelessly():
    assert entry("g1") is entry("G01") is ENTRIES["G01"]


@pytest.mark.parametrize(
    ("id", "words"), [("G77", "G01, G02"), ("X01", "There is no entry 'X01'"), ("", "no entry")]
)
def test_an_unknown_id_names_those_that_are_near(id, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        entry(id)
