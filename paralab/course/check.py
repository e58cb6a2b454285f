"""A lab sheet in Markdown against the document of a run: which values contradict it, which are
missing.

A value is found by its section, its table's columns, its row's first cell and its column:

    ## Part 3: the comparison
    | set-up | step time | total time |
    |---|---:|---:|
    | single | 36 ms | 1.2 s |            36 ms: the run has 34.6 ms, p10–p90 34.4–35.0 ms, with 25 % on both sides 25.8–43.8 ms
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import unescape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from msgspec.structs import replace

from paralab.analyse.blocks import Answer, Cell, Document, Table
from paralab.record.types import Record
from paralab.units import seconds, size

UNITS = {  # what is measured, and what a number is multiplied with
    "number": {"": 1.0, "×": 1.0, "x": 1.0, "times": 1.0},
    "time": {
        "s": 1.0,
        "sec": 1.0,
        "seconds": 1.0,
        "ms": 1e-3,
        "µs": 1e-6,
        "μs": 1e-6,
        "us": 1e-6,
        "min": 60.0,
    },
    "size": {
        "b": 1.0,
        "bytes": 1.0,
        "kb": 1e3,
        "mb": 1e6,
        "gb": 1e9,
        "kib": 2.0**10,
        "mib": 2.0**20,
        "gib": 2.0**30,
    },
    "share": {"%": 0.01},
}
ROUNDED = 0.05  # of the value: what rounding may hide at most; `0 min` is no way to write 30 ms
NUMBER = re.compile(
    r"^[~≈]?\s*([-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*([^\d\s(]*)\s*(?:\(.*\))?$"
)
EMPTY = ("", "…", "...", "-", "–", "—", "?", "_")
YES_NO = {
    "yes": True,
    "no": False,
    "ja": True,
    "nein": False,
    "oui": True,
    "non": False,
    "sí": True,
    "si": True,
}


# Only headings and tables have a structure here; "zero" leaves lists and quotes as text.
MARKDOWN = MarkdownIt("zero").enable(["heading", "table"])
TABLE_END = re.compile(r"^(\|.*\n)(?=[^|\n])", re.MULTILINE)


@dataclass
class Written:
    """One section of a sheet: its tables as rows of cells, header first, and its answers by
    question."""

    tables: list[list[list[str]]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)


def parse(text: str) -> dict[str, Written]:
    """The sections of a sheet by title. A bold line is a question, unless a table follows it."""
    sections: dict[str, Written] = {}
    current, question = Written(), None
    stripped = "\n".join(line.strip() for line in text.splitlines())
    # In Markdown only an empty line ends a table, but students forget it.
    tokens = MARKDOWN.parse(TABLE_END.sub(r"\1\n", stripped))
    for node in SyntaxTreeNode(tokens).children:
        if node.tag == "h2":
            current, question = sections.setdefault(_text_of(node), Written()), None
        elif node.type == "table":
            if question is not None and not current.answers[question]:
                del current.answers[question]  # it was the table's title
            rows = [row for part in node.children for row in part.children]
            current.tables.append([[_text_of(cell) for cell in row.children] for row in rows])
            question = None
        else:
            for line in map(str.strip, _text_of(node).splitlines()):
                if line.startswith("**") and line.endswith("**") and len(line) > 4:
                    question = line[2:-2].strip()
                    current.answers[question] = ""
                elif question is not None:
                    current.answers[question] = f"{current.answers[question]} {line}".strip()
    return sections


def _text_of(node: SyntaxTreeNode) -> str:
    return unescape(node.children[0].content)


def emptied(document: Document) -> Document:
    """The sheet to hand out: what is to be done stays, what came out is gone."""
    sections = []
    for section in document.sections:
        blocks: list[Any] = []
        for block in section.blocks:
            if isinstance(block, Table):
                rows = tuple((row[0], *(Cell(" ") for _ in row[1:])) for row in block.rows)
                blocks.append(replace(block, rows=rows, note=""))
            elif isinstance(block, Answer):
                blocks.append(Answer(block.question, "", {}))
        sections.append(replace(section, blocks=tuple(blocks)))
    facts = tuple((name, "") for name, _ in document.facts)
    return Document(
        document.title,
        "Fill in every cell, and answer every question; begin with Yes or No where it is one.",
        (),
        tuple(sections),
        facts,
    )


class CheckedValue(Record, frozen=True, kw_only=True):
    """A value of the sheet; `written` is None if it is missing, `reason` is empty if it agrees."""

    section: str
    table: str
    row: str
    column: str
    run: str  # what the run has
    written: str | None
    reason: str


class CheckResult(Record, frozen=True, kw_only=True):
    """What `practical check --json` prints."""

    tolerance: float
    checked: int
    contradictions: list[CheckedValue]
    missing: list[CheckedValue]
    not_in_this_run: list[str]
    practical: int | None = None
    sheet: str | None = None
    run_folder: str | None = None


def compared(text: str, document: Document, tolerance: float) -> CheckResult:
    """What contradicts the run, what is missing, what the run does not have."""
    written = parse(text)
    contradictions: list[CheckedValue] = []
    missing: list[CheckedValue] = []
    checked = 0
    for section in document.sections:
        mine = written.get(section.title)
        for block in section.blocks:
            if isinstance(block, Table):
                found = _checked_table(section.title, block, mine, tolerance)
            elif isinstance(block, Answer):
                found = _checked_answer(section.title, block, mine)
            else:
                continue
            for entry in found:
                checked += 1
                if entry.reason:
                    (missing if entry.written is None else contradictions).append(entry)
    known = {section.title for section in document.sections} | {"What these numbers depend on"}
    return CheckResult(
        tolerance=tolerance,
        checked=checked,
        contradictions=contradictions,
        missing=missing,
        not_in_this_run=[title for title in written if title not in known],
    )


def _checked_table(
    section: str, table: Table, mine: Written | None, tolerance: float
) -> Iterator[CheckedValue]:
    theirs = (
        next(
            (
                rows
                for rows in mine.tables
                if rows and [_plain(c) for c in rows[0]] == [_plain(c) for c in table.columns]
            ),
            None,
        )
        if mine
        else None
    )
    body = {_plain(row[0]): row for row in theirs[1:]} if theirs else {}
    for row in table.rows:
        words = body.get(_plain(row[0].text))
        for place, cell in enumerate(row[1:], start=1):
            given = words[place] if words and place < len(words) else ""
            empty = given.strip() in EMPTY
            yield CheckedValue(
                section=section,
                table=table.title,
                row=row[0].text,
                column=table.columns[place],
                run=_with_spread(cell),
                written=None if empty else given,
                reason="not filled in" if empty else contradiction(given, cell, tolerance),
            )


def _checked_answer(section: str, answer: Answer, mine: Written | None) -> Iterator[CheckedValue]:
    given = (
        next(
            (
                words
                for question, words in mine.answers.items()
                if _plain(question) == _plain(answer.question)
            ),
            "",
        )
        if mine
        else ""
    )
    empty = given.strip() in EMPTY
    said = YES_NO.get(re.split(r"\W+", given.strip().lower(), maxsplit=1)[0])
    wrong = answer.verdict is not None and said is not None and said != answer.verdict
    yield CheckedValue(
        section=section,
        table="",
        row=answer.question,
        column="",
        run=_verdict(answer.verdict) or answer.text,
        written=None if empty else given,
        reason="not answered" if empty else answer.text if wrong else "",
    )


def _verdict(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def contradiction(given: str, cell: Cell, tolerance: float) -> str:
    """Why what was written cannot be; empty where it can."""
    if cell.value is None:
        return ""  # the run does not know better
    if _plain(given) == _plain(cell.text):
        return ""
    if isinstance(cell.value, bool):
        said = YES_NO.get(_plain(given))
        return "" if said is cell.value else f"the run says {_verdict(cell.value)}"
    if isinstance(cell.value, str):
        return "" if _same_words(given, cell.value) else _other_words(given, cell.value)
    pieces = re.split(r"\s+and\s+|\s*;\s*", given)
    if len(pieces) > 1:  # `94 % and 66 %`: one number per device
        return next(
            (reason for piece in pieces if (reason := contradiction(piece, cell, tolerance))), ""
        )
    number, step, kind = parsed(given)
    if number is None:
        return f"{given!r} is no number with a unit that is known"
    known = parsed(cell.text)[2]
    if known and kind != known and {kind, known} != {"number", "share"}:
        return f"it is a {kind}, the run has a {known}"
    step = min(step, 2 * ROUNDED * abs(cell.value))
    if cell.low is None or cell.high is None:
        return (
            ""
            if abs(number - cell.value) <= step / 2 * 1.001 or number == cell.value
            else "this is counted, not measured: it must be equal"
        )
    low, high = sorted((cell.low * (1 - tolerance), cell.high * (1 + tolerance)))
    if low - step / 2 <= number <= high + step / 2:
        return ""
    times = number / cell.value if cell.value else math.inf
    allowed = f"{_like(low, cell)} to {_like(high, cell)} with {tolerance:.0%} on both sides"
    return f"{times:.3g} times the run's value; allowed is {allowed}"


def _same_words(given: str, known: str) -> bool:
    """The same numbers in the same order, and no word that is not there: `32/32` for `by each rank:
    32/32`."""
    mine, theirs = (re.findall(r"[^\W\d_]+|\d+", _plain(words)) for words in (given, known))
    mine, theirs = ([word for word in words if word != "and"] for words in (mine, theirs))
    numbers = [[word for word in words if word.isdigit()] for words in (mine, theirs)]
    return mine == theirs or (
        bool(numbers[1]) and numbers[0] == numbers[1] and set(mine) <= set(theirs)
    )


def _other_words(given: str, known: str) -> str:
    if not re.fullmatch(r"[\d/]+", known):
        return "a name must be the run's"
    mine, theirs = (
        sum(int(digits[:18]) for digits in re.findall(r"\d+", words)) for words in (given, known)
    )
    return (
        "the sum is right, the parts are not"
        if mine == theirs
        else f"it adds up to {mine}, the batch has {theirs}"
    )


def parsed(words: str) -> tuple[float | None, float, str]:
    """(the number in seconds, bytes or as a share; what its last digit is worth; its kind): `34.6
    ms` -> 0.0346, 0.0001, time."""
    found = NUMBER.match(words.replace("`", "").strip())
    kind = next(
        (kind for kind, units in UNITS.items() if found and found[2].lower() in units), None
    )
    if not found or kind is None:
        return None, 0.0, ""
    factor = UNITS[kind][found[2].lower()]
    digits = found[1].replace(",", "")
    mantissa, _, exponent = digits.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    try:
        number, worth = float(digits) * factor, 10.0 ** (int(exponent or 0) - decimals) * factor
    except (OverflowError, ValueError):
        return None, 0.0, ""
    if not math.isfinite(number):
        return None, 0.0, ""
    return number, worth if factor != 1.0 or decimals else 0.0, kind


def _with_spread(cell: Cell) -> str:
    """`34.6 ms (34.4 ms to 35.0 ms)`."""
    if cell.low is None or cell.high is None or cell.low == cell.high or "(" in cell.text:
        return cell.text
    return f"{cell.text} ({_like(cell.low, cell)} to {_like(cell.high, cell)})"


def _like(value: float, cell: Cell) -> str:
    """A number in the unit of a cell's words."""
    unit = cell.text.partition(" ")[2].split(" ")[0]
    if unit in ("s", "ms", "µs"):
        return seconds(value)
    if unit in ("B", "KiB", "MiB", "GiB"):
        return size(value)
    return f"{value:.0%}" if unit == "%" else f"{value:.3g}"


def _plain(words: str) -> str:
    """What counts when words are compared: no case, no code marks, single blanks."""
    return " ".join(words.replace("`", "").replace("*", "").lower().split())
