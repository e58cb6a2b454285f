"""Compare a filled-in lab sheet (Markdown) with a run: which values contradict it or are missing.

A value is found by its section, the columns of its table, its row's first cell, and its column:

    ## Part 3: the comparison
    | configuration | step time | total time |
    |---|---:|---:|
    | single | 36 ms | 1.2 s |

Say the run measured 34.6 ms with p10–p90 34.4–35.0 ms. With a tolerance of 25 % on both sides,
25.8–43.8 ms agree with it, so 36 ms does.
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

UNITS = {  # kind -> unit -> factor to seconds, bytes, or 1
    "number": {"": 1.0, "×": 1.0, "x": 1.0, "times": 1.0},
    "time": {"min": 60.0, "s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3}
    | dict.fromkeys(("µs", "μs", "us"), 1e-6),
    "size": {"b": 1.0, "bytes": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9}
    | {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30},
    "share": {"%": 0.01},
}
ROUNDED = 0.05  # the most that rounding may hide, as a share: `0 min` does not stand for 30 ms
NUMBER = re.compile(
    r"^[~≈]?\s*([-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*([^\d\s(]*)\s*(?:\(.*\))?$"
)
EMPTY = ("", "…", "...", "-", "–", "—", "?", "_")
YES_NO = dict.fromkeys(("yes", "ja", "oui", "sí", "si"), True)
YES_NO |= dict.fromkeys(("no", "nein", "non"), False)

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


def blank_sheet(document: Document) -> Document:
    """The sheet to hand out: tables and questions without results."""
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

    task = "Fill in every cell and answer every question. Start with Yes or No where that fits."
    facts = tuple((name, "") for name, _ in document.facts)
    return Document(document.title, task, (), tuple(sections), facts)


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


def check_sheet(text: str, document: Document, tolerance: float) -> CheckResult:
    """Which values contradict the run, which are missing, and which sections the run lacks."""
    written = parse(text)
    values: list[CheckedValue] = []
    for section in document.sections:
        mine = written.get(section.title, Written())
        for block in section.blocks:
            if isinstance(block, Table):
                values += _check_table(section.title, block, mine, tolerance)
            elif isinstance(block, Answer):
                values.append(_check_answer(section.title, block, mine))

    known = {section.title for section in document.sections} | {"What these numbers depend on"}
    return CheckResult(
        tolerance=tolerance,
        checked=len(values),
        contradictions=[value for value in values if value.reason and value.written is not None],
        missing=[value for value in values if value.written is None],
        not_in_this_run=[title for title in written if title not in known],
    )


def _check_table(
    section: str, table: Table, mine: Written, tolerance: float
) -> Iterator[CheckedValue]:
    columns = [_plain(column) for column in table.columns]
    same = [rows for rows in mine.tables if [_plain(cell) for cell in rows[0]] == columns]
    body = {_plain(row[0]): row for row in same[0][1:]} if same else {}
    for row in table.rows:
        cells = body.get(_plain(row[0].text), [""] * len(columns))
        for column, cell, given in zip(table.columns[1:], row[1:], cells[1:], strict=True):
            empty = given.strip() in EMPTY
            yield CheckedValue(
                section=section,
                table=table.title,
                row=row[0].text,
                column=column,
                run=_show_spread(cell),
                written=None if empty else given,
                reason="not filled in" if empty else find_contradiction(given, cell, tolerance),
            )


def _check_answer(section: str, answer: Answer, mine: Written) -> CheckedValue:
    answers = {_plain(question): words for question, words in mine.answers.items()}
    given = answers.get(_plain(answer.question), "").strip()
    empty = given in EMPTY
    verdict = YES_NO.get(re.split(r"\W+", given.lower(), maxsplit=1)[0])
    wrong = None not in (verdict, answer.verdict) and verdict != answer.verdict
    return CheckedValue(
        section=section,
        table="",
        row=answer.question,
        column="",
        run=_yes_no(answer.verdict) or answer.text,
        written=None if empty else given,
        reason="not answered" if empty else answer.text if wrong else "",
    )


def _yes_no(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def find_contradiction(given: str, cell: Cell, tolerance: float) -> str:
    """Why the written value cannot be right; empty if it can."""
    if cell.value is None or _plain(given) == _plain(cell.text):
        return ""
    if isinstance(cell.value, bool):
        right = YES_NO.get(_plain(given)) is cell.value
        return "" if right else f"the run says {_yes_no(cell.value)}"
    if isinstance(cell.value, str):
        return "" if _same_words(given, cell.value) else _explain_words(given, cell.value)
    pieces = re.split(r"\s+and\s+|\s*;\s*", given)  # `94 % and 66 %`: one number per device
    reasons = (_compare_number(piece, cell, cell.value, tolerance) for piece in pieces)
    return next(filter(None, reasons), "")


def _compare_number(given: str, cell: Cell, value: float, tolerance: float) -> str:
    number, step, kind = parse_number(given)
    if number is None:
        return f"{given!r} is not a number with a known unit"
    known = parse_number(cell.text)[2]
    if known and kind != known and {kind, known} != {"number", "share"}:
        return f"this is a {kind}, and the run has a {known}"

    step = min(step, 2 * ROUNDED * abs(value))
    if cell.low is None or cell.high is None:
        equal = number == value or abs(number - value) <= step / 2 * 1.001
        return "" if equal else "counted values must be equal"
    low, high = sorted((cell.low * (1 - tolerance), cell.high * (1 + tolerance)))
    if low - step / 2 <= number <= high + step / 2:
        return ""
    ratio = number / value if value else math.inf
    allowed = f"{_like(low, cell)} to {_like(high, cell)}"
    return f"{ratio:.3g}× the run's value; allowed: {allowed} ({tolerance:.0%} on both sides)"


def _same_words(given: str, known: str) -> bool:
    """Whether both have the same numbers in the same order, and `given` has no extra words: `32/32`
    matches `by each rank: 32/32`."""
    mine, theirs = (re.findall(r"[^\W\d_]+|\d+", _plain(words)) for words in (given, known))
    mine, theirs = ([word for word in words if word != "and"] for words in (mine, theirs))
    numbers = [[word for word in words if word.isdigit()] for words in (mine, theirs)]
    return mine == theirs or (
        bool(numbers[1]) and numbers[0] == numbers[1] and set(mine) <= set(theirs)
    )


def _explain_words(given: str, known: str) -> str:
    if not re.fullmatch(r"[\d/]+", known):
        return "names must be equal"
    mine, theirs = (
        sum(int(digits[:18]) for digits in re.findall(r"\d+", words)) for words in (given, known)
    )
    return (
        "the sum is right, but the parts are wrong"
        if mine == theirs
        else f"the sum is {mine}, but the batch has {theirs}"
    )


def parse_number(words: str) -> tuple[float | None, float, str]:
    """(the number in seconds, bytes, or as a share; the value of its last digit; its kind).

    34.6 ms -> 0.0346, 0.0001, time
    """
    match = NUMBER.match(words.replace("`", "").strip())
    unit = match[2].lower() if match else ""
    kind = next((kind for kind, units in UNITS.items() if unit in units), None)
    if not match or kind is None:
        return None, 0.0, ""

    factor = UNITS[kind][unit]
    digits = match[1].replace(",", "")
    mantissa, _, exponent = digits.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    try:
        number, last = float(digits) * factor, 10.0 ** (int(exponent or 0) - decimals) * factor
    except (OverflowError, ValueError):
        return None, 0.0, ""
    if not math.isfinite(number):
        return None, 0.0, ""
    return number, last if factor != 1.0 or decimals else 0.0, kind


def _show_spread(cell: Cell) -> str:
    """`34.6 ms (34.4 ms to 35.0 ms)`."""
    if cell.low is None or cell.high is None or cell.low == cell.high or "(" in cell.text:
        return cell.text
    return f"{cell.text} ({_like(cell.low, cell)} to {_like(cell.high, cell)})"


def _like(value: float, cell: Cell) -> str:
    """Format a number in the unit of a cell."""
    unit = cell.text.partition(" ")[2].split(" ")[0]
    if unit in ("s", "ms", "µs"):
        return seconds(value)
    if unit in ("B", "KiB", "MiB", "GiB"):
        return size(value)
    return f"{value:.0%}" if unit == "%" else f"{value:.3g}"


def _plain(words: str) -> str:
    """Words in a form to compare: lower case, no code or emphasis marks, single spaces."""
    return " ".join(words.replace("`", "").replace("*", "").lower().split())
