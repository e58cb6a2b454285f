"""Grade a sheet against its run. Each item is right, wrong, missing, or not judged. judge_cell.py
judges table cells, and judge.py judges answers. A human must read the items that are not judged;
their points do not count.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from paralab.analyse.blocks import Answer, Document, Section, Table
from paralab.course.judge import Status, judge, plain, verdict_word
from paralab.course.judge_cell import judge_cell
from paralab.course.numbers import Stated, numbers_in
from paralab.course.sheet_text import WrittenPart, label, parse
from paralab.errors import UsageError
from paralab.record.types import Record

EMPTY = ("", "…", "...", "-", "–", "—", "?", "_")
CHECKPOINT = (
    "Verification checkpoint"  # the handbook's part 4, which students also hand in as a file
)
MOST_QUESTIONS = 100  # read at most this many in one part
UNIT = re.compile(r"\s*[(\[]([^()\[\]\s]+)[)\]]\s*$")  # `step time (ms)`
Rows = list[list[str]]
CLOSE = 0.6  # questions at least this similar count as the same


class Item(Record, frozen=True, kw_only=False):
    """One graded cell or answer."""

    part: int
    place: str  # a cell, `step time of single`, or a question
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
    own_file = [number for number, section in expected.items() if CHECKPOINT in section.title]
    if own_file and CHECKPOINT in text.strip().partition("\n")[0]:  # only part 4 of the handbook
        expected = {number: expected[number] for number in own_file}
    if not written.keys() & expected.keys():
        fix = "write a blank sheet with `paralab practical N --blank FILE`, and keep its headings"
        raise UsageError(f"The sheet does not contain any part of {document.title!r}.", fix=fix)
    known = [number for section in document.sections for number in _find_numbers(section)]
    items: list[Item] = []
    for number, section in expected.items():
        own = written.get(number, WrittenPart())
        for table, rows in _pair_tables(section.of(Table), own.tables):
            items += _grade_table(number, table, rows, tolerance)
        for answer in section.of(Answer):
            items.append(_grade_answer(number, answer, own, tolerance, known))
    grade = Grade(tuple(items))
    if not grade.count("right") and not grade.count("wrong"):
        raise UsageError("The sheet is empty: fill in its cells and answer its questions.")
    return grade


def _require_same_practical(text: str, title: str) -> None:
    """Reject a sheet whose title names another practical."""
    heading = re.search(r"^# .*", text, re.MULTILINE)
    first = heading[0] if heading else text.strip().partition("\n")[0]
    names = [re.search(r"practical\s*\d+|handbook", words.lower()) for words in (first, title)]
    mine, known = (re.sub(r"\s+", " ", name[0]) if name else "" for name in names)
    if mine and known and mine != known:
        fix = f"paralab practical check {mine.removeprefix('practical ')} …, or another sheet"
        raise UsageError(f"This sheet is for {mine}, but the run is for {known}.", fix=fix)


def _find_numbers(section: Section) -> list[Stated]:
    """Return the numbers in a part's text, tables, and answers."""
    cells = [cell.text for table in section.of(Table) for row in table.rows for cell in row]
    answers = [answer.text for answer in section.of(Answer)]
    return numbers_in("; ".join([section.text, *cells, *answers]))


def part_number(title: str) -> int:
    match = re.match(r"Part (\d+)", title)
    assert match, title
    return int(match[1])


def _pair_tables(tables: Sequence[Table], written: list[Rows]) -> Iterator[tuple[Table, Rows]]:
    """Pair each expected table with the written table that has the most columns in common."""
    for table in tables:
        names = {_name(column) for column in table.columns}
        best = max(written, key=lambda rows: _similarity(names, rows), default=None)
        if best is None or not _similarity(names, best)[0]:
            yield table, []
        else:
            written = [rows for rows in written if rows is not best]
            yield table, best


def _similarity(names: set[str], rows: Rows) -> tuple[int, int]:
    """Return the number of columns in common and the number of cells that are filled in."""
    filled = sum(cell.strip() not in EMPTY for row in rows for cell in row)
    return len(names & {_name(cell) for cell in rows[0]}), filled


def _name(text: str) -> str:
    """Remove the unit and the punctuation from a row's or column's name: `step time (ms)`."""
    return " ".join(re.findall(r"\w+|[/÷]+", UNIT.sub("", plain(text))))


def _grade_table(part: int, table: Table, rows: Rows, tolerance: float) -> Iterator[Item]:
    header = [_name(cell) for cell in rows[0]] if rows else []
    lines = {_name(row[0]): row for row in rows[1:] if row}
    for row in table.rows:
        mine = lines.get(_name(row[0].text), [])
        for column, cell in zip(table.columns[1:], row[1:], strict=True):
            place = f"{column} of {row[0].text}"
            at = header.index(_name(column)) if _name(column) in header else len(mine)
            given = mine[at].strip() if at < len(mine) else ""
            if given in EMPTY:
                unknown = cell.text.startswith("not measured")
                yield Item(part, place, "not judged" if unknown else "missing", "", cell.text)
                continue
            unit = UNIT.search(rows[0][at])
            if unit and re.fullmatch(r"[\d.,]+", given):
                given = f"{given} {unit[1]}"
            status, reason = judge_cell(given, cell, tolerance, place)
            yield Item(part, place, status, given, cell.text, reason)


def find_answer(question: str, answers: Mapping[str, str]) -> str:
    """Find an answer by its question's label (`a)`, `Q1`), or by the most similar question."""
    own = label(question)
    similar = {}
    for asked, text in islice(answers.items(), MOST_QUESTIONS):
        if own and label(asked) == own:
            return text
        if not (own and label(asked)):
            pair = plain(asked[:200]), plain(question)
            similar[difflib.SequenceMatcher(None, *pair).ratio()] = text
    best = max(similar, default=0.0)
    return similar[best] if best >= CLOSE else ""


def _grade_answer(
    part: int, answer: Answer, own: WrittenPart, tolerance: float, known: Sequence[Stated]
) -> Item:
    given = find_answer(answer.question, own.answers)
    expected = verdict_word(answer) or answer.choice or answer.text
    if given.strip() in EMPTY:
        return Item(part, answer.question, "missing", "", expected)
    status, reason = judge(answer, given, tolerance, known)
    return Item(part, answer.question, status, given, expected, reason)
