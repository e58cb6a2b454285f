"""Grade a sheet against its run: each item is right, wrong, missing, or not judged.

A table cell is right if it agrees with the run. Counts, splits, and names must match exactly; times
must be within the run's p10–p90, widened by the tolerance. An answer is judged by the facts in the
template: yes or no, the choice, the numbers, and the key terms. An answer that states none of them
is left for a human to read and never counts as checked.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paralab.analyse.blocks import Answer, Cell, Document, Table
from paralab.course.sheet_text import WrittenPart, parse
from paralab.errors import UsageError
from paralab.record.types import Record
from paralab.units import seconds, size

Status = Literal["right", "wrong", "missing", "not judged"]

UNITS = {  # kind of number -> unit -> factor
    "number": dict.fromkeys(("", "×", "x", "times"), 1.0),
    "time": {
        **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
        "ms": 1e-3,
        **dict.fromkeys(("µs", "μs", "us"), 1e-6),
        "min": 60.0,
    },
    "size": {
        **dict.fromkeys(("b", "byte", "bytes"), 1.0),
        "kb": 1e3,
        "mb": 1e6,
        "gb": 1e9,
        "kib": 2.0**10,
        "mib": 2.0**20,
        "gib": 2.0**30,
    },
    "share": {"%": 0.01},
}
FACTORS = {unit: (kind, value) for kind, units in UNITS.items() for unit, value in units.items()}
DIGITS = r"[-+]?\d[\d,.]*(?:[eE][-+]?\d+)?"
NUMBER = re.compile(rf"^[~≈]?\s*({DIGITS})\s*([^\d\s(]*)\s*(?:\(.*\))?$")
IN_TEXT = re.compile(rf"({DIGITS})\s*(%|×|[A-Za-zµμ]+)?")
ROUNDING = 0.05  # maximum rounding error, as a share of the value
EMPTY = ("", "…", "...", "-", "–", "—", "?", "_")
YES = {"yes": True, "ja": True, "oui": True, "sí": True, "si": True}
YES_NO = {**YES, "no": False, "nein": False, "non": False}
CLOSE = 0.6  # minimum similarity at which two questions count as the same


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
        """Return (earned, possible) points. Items that were not judged do not count."""
        judged = [self.count(s, part) for s in ("right", "wrong", "missing")]
        return judged[0], sum(judged)

    @property
    def passed(self) -> bool:
        return not self.count("wrong") and not self.count("missing")


def grade(text: str, document: Document, tolerance: float) -> Grade:
    """Grade a sheet against a run's document."""
    written = parse(text)
    expected = {_number(section.title): section for section in document.sections}
    if not written.keys() & expected.keys():
        raise UsageError(
            f"The sheet has no part of {document.title!r}.",
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
                items.append(_grade_answer(number, block, _find_answer(block, own), tolerance))
    grade = Grade(tuple(items))
    if not grade.count("right") and not grade.count("wrong"):
        raise UsageError("The sheet is empty: fill in its cells and answer its questions.")
    return grade


def _number(title: str) -> int:
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
        names = {_plain(column) for column in table.columns}
        best = max(left, key=lambda rows: _overlap(names, rows), default=[])
        if best and _overlap(names, best):
            left.remove(best)
            pairs.append(best)
        else:
            pairs.append([])
    return pairs


def _overlap(names: set[str], rows: list[list[str]]) -> int:
    return len(names & {_plain(cell) for cell in rows[0]}) if rows else 0


def _grade_table(
    part: int, table: Table, rows: list[list[str]], tolerance: float
) -> Iterator[Item]:
    header = [_plain(cell) for cell in rows[0]] if rows else []
    lines = {_plain(row[0]): row for row in rows[1:] if row}
    for row in table.rows:
        mine = lines.get(_plain(row[0].text), [])
        for column, cell in zip(table.columns[1:], row[1:], strict=True):
            place = f"{column} of {row[0].text}"
            at = header.index(_plain(column)) if _plain(column) in header else len(mine)
            given = mine[at].strip() if at < len(mine) else ""
            shown = _with_spread(cell)
            if cell.value is None:
                yield Item(part, place, "not judged", given, shown)
            elif given in EMPTY:
                yield Item(part, place, "missing", "", shown)
            else:
                reason = contradiction(given, cell, tolerance)
                yield Item(part, place, "wrong" if reason else "right", given, shown, reason)


def _find_answer(answer: Answer, own: WrittenPart) -> str:
    """Find a written answer by its letter or number (`a)`, `Q1`), or else by the most similar
    question."""
    label = _label(answer.question)
    for question, text in own.answers.items():
        if label and _label(question) == label:
            return text
    similar = {
        difflib.SequenceMatcher(None, _plain(question), _plain(answer.question)).ratio(): text
        for question, text in own.answers.items()
        if not (label and _label(question))
    }
    best = max(similar, default=0.0)
    return similar[best] if best >= CLOSE else ""


def _label(question: str) -> str:
    found = re.match(r"\s*(?:([a-h])\)|(q\d+)\b)", question.lower())
    return (found[1] or found[2]) if found else ""


def _grade_answer(part: int, answer: Answer, given: str, tolerance: float) -> Item:
    verdict = "" if answer.verdict is None else "yes" if answer.verdict else "no"
    expected = verdict or answer.choice or answer.text
    place = answer.question
    if given.strip() in EMPTY:
        return Item(part, place, "missing", "", expected)

    wrong = _false_fact(answer, given, tolerance)
    if wrong:
        return Item(part, place, "wrong", given, expected, wrong)
    facts = [
        answer.verdict is not None and yes_or_no(given) == answer.verdict,
        bool(answer.choice) and _plain(answer.choice or "") in _plain(given),
        _confirms_a_number(answer, given, tolerance),
        bool(answer.terms) and all(_has_term(term, given) for term in answer.terms),
    ]
    return Item(part, place, "right" if any(facts) else "not judged", given, expected)


def _false_fact(answer: Answer, given: str, tolerance: float) -> str:
    """Return what the answer states but the run contradicts, or an empty string."""
    if answer.verdict is not None:
        said = yes_or_no(given)
        if said is None:
            return "start with Yes or No"
        if said != answer.verdict:
            return answer.text
    if answer.choice and _plain(answer.choice) not in _plain(given):
        return f"the run says {answer.choice}: {answer.text}"
    stated, known = _stated(given), _flat(answer.evidence)
    by_numbers = answer.verdict is None and not answer.choice and stated and known
    if by_numbers and not any(_states(number, stated, tolerance) for number in known):
        return f"none of these numbers matches the run: {answer.text}"
    return ""


def yes_or_no(text: str) -> bool | None:
    return YES_NO.get(re.split(r"\W+", text.strip().lower(), maxsplit=1)[0])


def _has_term(term: str, text: str) -> bool:
    """Return whether the text contains one of the alternatives in a term such as `copy|gather`."""
    return any(word.lower() in text.lower() for word in term.split("|"))


def _flat(evidence: Any) -> list[float]:
    """Return all numbers in the evidence."""
    if isinstance(evidence, dict):
        return [number for value in evidence.values() for number in _flat(value)]
    if isinstance(evidence, list | tuple):
        return [number for value in evidence for number in _flat(value)]
    is_number = isinstance(evidence, int | float) and not isinstance(evidence, bool)
    return [float(evidence)] if is_number else []


def _stated(text: str) -> list[float]:
    """Return the numbers in a sentence, converted to seconds, bytes, or shares if they have a
    unit."""
    found = []
    for digits, unit in IN_TEXT.findall(text):
        number = read_number(digits.rstrip(".,"))
        _, factor = FACTORS.get(unit.lower(), ("number", 1.0))
        if number is not None:
            found.append(number * factor)
    return found


def _states(known: float, stated: list[float], tolerance: float) -> bool:
    """Whether an answer states a number of the run: a count exactly, others within tolerance."""
    if known.is_integer() and abs(known) < 1000:
        return known in stated
    return any(abs(number - known) <= (tolerance + ROUNDING) * abs(known) for number in stated)


def _confirms_a_number(answer: Answer, given: str, tolerance: float) -> bool:
    """Whether the answer states one of the run's numbers, and all of them if it is a list. "All on
    GPU 0" does not state that ranks 0 and 1 use GPUs 0 and 1."""
    stated = _stated(given)
    facts = [numbers for value in answer.evidence.values() if (numbers := _flat(value))]
    return any(all(_states(number, stated, tolerance) for number in fact) for fact in facts)


def contradiction(given: str, cell: Cell, tolerance: float) -> str:
    """Explain why a cell is wrong. Return an empty string if it may be right."""
    if cell.value is None or _plain(given) == _plain(cell.text):
        return ""
    if isinstance(cell.value, bool):
        said = YES_NO.get(_plain(given))
        return "" if said is cell.value else f"the run says {'yes' if cell.value else 'no'}"
    if isinstance(cell.value, str):
        return "" if _same_words(given, cell.value) else _other_words(given, cell.value)
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
    times = number / cell.value if cell.value else math.inf
    allowed = f"{_like(low, cell)} to {_like(high, cell)} (tolerance {tolerance:.0%})"
    return f"{times:.3g}× the run's value; allowed: {allowed}"


def _same_words(given: str, known: str) -> bool:
    """Return whether both have the same numbers in the same order and no other words: `32, 32`
    matches `32/32`."""
    mine, theirs = (re.findall(r"[^\W\d_]+|\d+", _plain(words)) for words in (given, known))
    mine, theirs = ([word for word in words if word != "and"] for words in (mine, theirs))
    numbers = [[word for word in words if word.isdigit()] for words in (mine, theirs)]
    same_numbers = bool(numbers[1]) and numbers[0] == numbers[1]
    return mine == theirs or (same_numbers and set(mine) <= set(theirs))


def _other_words(given: str, known: str) -> str:
    if not re.fullmatch(r"[\d/]+", known):
        return f"the run has {known}"
    mine, theirs = (
        sum(int(digits[:18]) for digits in re.findall(r"\d+", words)) for words in (given, known)
    )
    if mine == theirs:
        return "the sum is right, but the parts are not"
    return f"it adds up to {mine}, but the batch has {theirs}"


def parsed(words: str) -> tuple[float | None, float, str]:
    """Parse `34.6 ms` into (0.0346, 0.0001, "time"): the number, the value of its last digit, and
    its kind."""
    found = NUMBER.match(words.replace("`", "").strip())
    if not found or found[2].lower() not in FACTORS:
        return None, 0.0, ""
    kind, factor = FACTORS[found[2].lower()]
    number = read_number(found[1])
    if number is None or not math.isfinite(number * factor):
        return None, 0.0, ""
    mantissa, _, exponent = _with_point(found[1]).lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    worth = 10.0 ** (int(exponent or 0) - decimals) * factor
    return number * factor, worth if factor != 1.0 or decimals else 0.0, kind


def read_number(digits: str) -> float | None:
    """Parse a number with separators: `1,768` is 1768, `39,7` is 39.7, and `1.234,5` is 1234.5."""
    try:
        number = float(_with_point(digits))
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _with_point(digits: str) -> str:
    last = max(digits.rfind(","), digits.rfind("."))
    if "," in digits and "." in digits:
        whole = digits[:last].replace(",", "").replace(".", "")
        return f"{whole}.{digits[last + 1 :]}"
    if re.fullmatch(r"[-+]?[1-9]\d{0,2}(,\d{3})+", digits):
        return digits.replace(",", "")
    return digits.replace(",", ".")


def _with_spread(cell: Cell) -> str:
    """`34.6 ms (34.4 ms to 35.0 ms)`."""
    if cell.low is None or cell.high is None or cell.low == cell.high or "(" in cell.text:
        return cell.text
    return f"{cell.text} ({_like(cell.low, cell)} to {_like(cell.high, cell)})"


def _like(value: float, cell: Cell) -> str:
    """Format a number in a cell's unit."""
    unit = cell.text.partition(" ")[2].split(" ")[0]
    if unit in ("s", "ms", "µs"):
        return seconds(value)
    if unit in ("B", "KiB", "MiB", "GiB"):
        return size(value)
    return f"{value:.0%}" if unit == "%" else f"{value:.3g}"


def _plain(words: str) -> str:
    """Return the text in lower case, without code marks and extra spaces."""
    return " ".join(words.replace("`", "").replace("*", "").lower().split())
