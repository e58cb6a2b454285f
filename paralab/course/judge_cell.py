"""Judge a table cell against the run.

Counts, splits, and names must match exactly. Times must be within the run's p10–p90 range, widened
by the tolerance. The unit, the separators, and the words around a number do not matter: `39,7 ms`,
`0.0397 s`, and `about 40 ms` are the same.
"""

import math
import re

from paralab.analyse.blocks import Cell
from paralab.course.judge import Judgment, plain, yes_or_no
from paralab.course.numbers import ROUNDING, Stated, quantities

NONE = ("no", "none", "n/a", "not available")
# Pieces of `94% and 66%`: one number per device.
PIECES = re.compile(r"\s*(?:,?\s+and\s+|;|\s/\s|,\s)\s*")


def judge_cell(given: str, cell: Cell, tolerance: float, place: str = "") -> Judgment:
    """Judge a cell. `place` names its row and column, whose words the cell may repeat."""
    written = plain(given)
    if written == plain(cell.text):
        return "right", ""
    if cell.value is None:
        return "not judged", ""
    if isinstance(cell.value, bool):
        right = yes_or_no(written) is cell.value
        return ("right", "") if right else ("wrong", f"the run says {cell.text}")
    if isinstance(cell.value, str):
        return _judge_words(written, plain(cell.value), plain(place))

    pieces, known = PIECES.split(written), PIECES.split(cell.text)
    if len(pieces) == 1:
        return _judge_number(given, cell, tolerance, place)
    for number, piece in enumerate(pieces):
        own = cell
        if len(known) == len(pieces):
            value = quantities(known[number])[0].value
            own = Cell(known[number], value, value, value)
        judgment = _judge_number(piece, own, tolerance, place)
        if judgment[0] != "right":
            return judgment
    return "right", ""


def _judge_number(given: str, cell: Cell, tolerance: float, place: str) -> Judgment:
    numbers = quantities(given)
    if not numbers:
        clear = not re.search(r"\d.*\d", given)
        reason = f"{given!r} is not a number with a known unit"
        return "wrong" if clear or len(given) > 40 else "not judged", reason
    judgments = [_compare(number, cell, tolerance) for number in numbers]
    reason = min(judgments, key=len)  # no reason if any interpretation is right
    noun = numbers[0].noun
    if not reason and noun and noun[:4] not in plain(place):
        return "not judged", f"{noun!r} is not a known unit"
    return ("wrong", judgments[0]) if reason else ("right", "")


def _compare(number: Stated, cell: Cell, tolerance: float) -> str:
    """Return why a number is wrong, or an empty string."""
    known = next((each.kind for each in quantities(cell.text)), "")
    kinds = {number.kind, known}
    if "" not in kinds and len(kinds) > 1 and kinds != {"number", "share"}:
        if number.kind == "number":
            return f"write its unit; the run has {cell.text}"
        return f"this is a {number.kind}, but the run has a {known}"
    step = min(number.step, 2 * ROUNDING * abs(cell.value))
    if cell.low is None or cell.high is None:
        exact = number.value == cell.value or abs(number.value - cell.value) <= step / 2 * 1.001
        return "" if exact else "it must match, except for rounding"
    low, high = sorted((cell.low * (1 - tolerance), cell.high * (1 + tolerance)))
    if low - step / 2 <= number.value <= high + step / 2:
        return ""
    shares = [bound / cell.value if cell.value else math.inf for bound in (number.value, low, high)]
    return "{:.3g}× the run's value; {:.2f}× to {:.2f}× is allowed".format(*shares)


def _judge_words(given: str, known: str, place: str) -> Judgment:
    """Compare names and splits: the same numbers in the same order; `32, 32` matches `32/32`."""
    if known in NONE and given in (*NONE, f"no {place.split(' of ')[-1]}"):
        return "right", ""
    mine, theirs = (re.findall(r"[^\W\d_]+|\d+", words) for words in (given, known))
    allowed = {*theirs, *re.findall(r"\w+", place), "and", "samples"}
    mine, theirs = ([w for w in words if w != "and"] for words in (mine, theirs))
    numbers = [[word for word in words if word.isdigit()] for words in (mine, theirs)]
    if mine == theirs or (numbers[1] and numbers[0] == numbers[1] and set(mine) <= allowed):
        return "right", ""
    if "/" not in known and sorted(mine) == sorted(theirs):
        return "not judged", "the order differs"
    return "wrong", "this must match the run exactly"
