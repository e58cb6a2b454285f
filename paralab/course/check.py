"""Grade a sheet against its run. Each item is right, wrong, missing, or not judged.

A table cell is right if it agrees with the run. Counts, splits, and names must match exactly. Times
must be within the run's p10–p90 range, widened by the tolerance. judge.py judges the answers. An
item that is not judged is left for a human to read, and its points are not counted.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paralab.analyse.blocks import Answer, Cell, Document, Table
from paralab.course.judge import YES_NO, Status, judge, plain
from paralab.course.numbers import ROUNDING, parsed
from paralab.course.sheet_text import WrittenPart, label, parse
from paralab.errors import UsageError
from paralab.record.types import Record

EMPTY = ("", "…", "...", "-", "–", "—", "?", "_")
CLOSE = 0.6  # minimum similarity for two questions to be treated as the same


class Item(Record, frozen=True, kw_only=False):
    """One graded cell or answer."""

    part: int
    place: str  # `step time of single`, or the question
    status: Status
    written: str = ""
    expected: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Grade:
    items: tuple[Item, ...]

    def count(self, status: str, part: int | None = None) -> int:
        return sum(i.status == status and part in (None, i.part) for i in self.items)

    @property
    def parts(self) -> list[int]:
        return list(dict.fromkeys(item.part for item in self.items))

    def points(self, part: int | None = None) -> tuple[int, int]:
        """Return the earned and the possible points. Items that were not judged do not count."""
        judged = [self.count(s, part) for s in ("right", "wrong", "missing")]
        return judged[0], sum(judged)

    @property
    def passed(self) -> bool:
        return not self.count("wrong") and not self.count("missing")


def grade(text: str, document: Document, tolerance: float) -> Grade:
    """Grade a sheet against a run's document."""
    _require_same_practical(text, document.title)
    written = parse(text)
    expected = {part_number(section.title): section for section in document.sections}
    if "checkpoint" in text.strip().partition("\n")[0].lower():  # only part 4 of the handbook
        expected = {number: expected[number] for number in expected if number in written}
    if not written.keys() & expected.keys():
        raise UsageError(
            f"The sheet contains no part of {document.title!r}.",
            fix="use a sheet from `paralab practical N --blank FILE`, and keep its headings",
        )
    items: list[Item] = []
    for number, section in expected.items():
        own = written.get(number, WrittenPart(number))
        tables = [block for block in section.blocks if isinstance(block, Table)]
        for table, rows in zip(tables, _pair_tables(tables, own.tables), strict=True):
            items += _grade_table(number, table, rows, tolerance)
        for block in section.blocks:
            if isinstance(block, Answer):
                items.append(_grade_answer(number, block, own, tolerance))
    grade = Grade(tuple(items))
    if not grade.count("right") and not grade.count("wrong"):
        raise UsageError("The sheet is empty: fill in its cells and answer its questions.")
    return grade


def _require_same_practical(text: str, title: str) -> None:
    """Reject a sheet whose first line names another practical."""
    first = text.strip().partition("\n")[0]
    names = [re.search(r"practical\s*\d+|handbook", words.lower()) for words in (first, title)]
    mine, known = (re.sub(r"\s+", " ", name[0]) if name else "" for name in names)
    if mine and known and mine != known:
        raise UsageError(
            f"This sheet is for {mine}, but the run is for {known}.",
            fix=f"paralab practical check {mine.removeprefix('practical ')} …, or another sheet",
        )


def part_number(title: str) -> int:
    found = re.match(r"Part (\d+)", title)
    assert found, title
    return int(found[1])


def _pair_tables(
    tables: Sequence[Table], written: Sequence[list[list[str]]]
) -> list[list[list[str]]]:
    """Pair each expected table with the written table that has the most columns in common."""
    left = list(written)
    pairs: list[list[list[str]]] = []
    for table in tables:
        names = {plain(column) for column in table.columns}
        best = max(left, key=lambda rows: (_overlap(names, rows), _filled(rows)), default=[])
        if best and _overlap(names, best):
            left.remove(best)
            pairs.append(best)
        else:
            pairs.append([])
    return pairs


def _overlap(names: set[str], rows: list[list[str]]) -> int:
    return len(names & {plain(cell) for cell in rows[0]}) if rows else 0


def _filled(rows: list[list[str]]) -> int:
    return sum(cell.strip() not in EMPTY for row in rows for cell in row)


def _grade_table(
    part: int, table: Table, rows: list[list[str]], tolerance: float
) -> Iterator[Item]:
    header = [plain(cell) for cell in rows[0]] if rows else []
    lines = {plain(row[0]): row for row in rows[1:] if row}
    for row in table.rows:
        mine = lines.get(plain(row[0].text), [])
        for column, cell in zip(table.columns[1:], row[1:], strict=True):
            place = f"{column} of {row[0].text}"
            at = header.index(plain(column)) if plain(column) in header else len(mine)
            given = mine[at].strip() if at < len(mine) else ""
            if cell.value is None:
                yield Item(part, place, "not judged", given, cell.text)
            elif given in EMPTY:
                yield Item(part, place, "missing", "", cell.text)
            else:
                reason = contradiction(given, cell, tolerance)
                yield Item(part, place, "wrong" if reason else "right", given, cell.text, reason)


def find_answer(question: str, answers: Mapping[str, str]) -> str:
    """Find a written answer by the letter or number of its question (`a)`, `Q1`), or else by the
    most similar question."""
    own = label(question)
    similar = {}
    for asked, text in answers.items():
        if own and label(asked) == own:
            return text
        if not (own and label(asked)):
            pair = plain(asked), plain(question)
            similar[difflib.SequenceMatcher(None, *pair).ratio()] = text
    best = max(similar, default=0.0)
    return similar[best] if best >= CLOSE else ""


def _grade_answer(part: int, answer: Answer, own: WrittenPart, tolerance: float) -> Item:
    given = find_answer(answer.question, own.answers)
    verdict = "" if answer.verdict is None else "yes" if answer.verdict else "no"
    expected = verdict or answer.choice or answer.text
    place = answer.question
    if given.strip() in EMPTY:
        return Item(part, place, "missing", "", expected)

    status, reason = judge(answer, given, tolerance)
    return Item(part, place, status, given, expected, reason)


def contradiction(given: str, cell: Cell, tolerance: float) -> str:
    """Explain why a cell is wrong. Return an empty string if the cell may be right."""
    if cell.value is None or plain(given) == plain(cell.text):
        return ""
    if isinstance(cell.value, bool):
        said = YES_NO.get(plain(given))
        return "" if said is cell.value else f"the run says {'yes' if cell.value else 'no'}"
    if isinstance(cell.value, str):
        return "" if _same_words(given, cell.value) else "names and splits must match"
    pieces = re.split(r"\s+and\s+|\s*;\s*", given)
    if len(pieces) > 1:  # `94 % and 66 %`: one number per device
        return next(
            (reason for piece in pieces if (reason := contradiction(piece, cell, tolerance))), ""
        )
    return _compare_number(given, cell, tolerance)


def _compare_number(given: str, cell: Cell, tolerance: float) -> str:
    number, step, kind = parsed(given)
    if number is None:
        return f"{given!r} is not a number with a known unit"
    known = parsed(cell.text)[2]
    if known and kind != known and {kind, known} != {"number", "share"}:
        return f"this is a {kind}, but the run has a {known}"
    step = min(step, 2 * ROUNDING * abs(cell.value))
    if cell.low is None or cell.high is None:
        exact = number == cell.value or abs(number - cell.value) <= step / 2 * 1.001
        return "" if exact else "a count must match exactly"
    low, high = sorted((cell.low * (1 - tolerance), cell.high * (1 + tolerance)))
    if low - step / 2 <= number <= high + step / 2:
        return ""
    shares = [bound / cell.value if cell.value else math.inf for bound in (number, low, high)]
    return "{:.3g}× the run's value; {:.2f}× to {:.2f}× is allowed".format(*shares)


def _same_words(given: str, known: str) -> bool:
    """Return whether both have the same numbers in the same order and no other words: `32, 32`
    matches `32/32`."""
    mine, theirs = (re.findall(r"[^\W\d_]+|\d+", plain(words)) for words in (given, known))
    mine, theirs = ([word for word in words if word != "and"] for words in (mine, theirs))
    numbers = [[word for word in words if word.isdigit()] for words in (mine, theirs)]
    same_numbers = bool(numbers[1]) and numbers[0] == numbers[1]
    return mine == theirs or (same_numbers and set(mine) <= set(theirs))
