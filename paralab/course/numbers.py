"""Read numbers the way students write them: `39,7 ms`, `0.0397 s`, `1,768`, `94 %`, `two`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

UNITS = (
    ("number", 1.0, ("", "×", "x", "times")),
    ("time", 1.0, ("s", "sec", "second", "seconds")),
    ("time", 60.0, ("min",)),
    ("time", 1e-3, ("ms",)),
    ("time", 1e-6, ("µs", "μs", "us")),
    ("size", 1.0, ("b", "byte", "bytes")),
    *(("size", 10.0**power, (unit,)) for power, unit in ((3, "kb"), (6, "mb"), (9, "gb"))),
    *(("size", 2.0**power, (unit,)) for power, unit in ((10, "kib"), (20, "mib"), (30, "gib"))),
    ("share", 0.01, ("%",)),
)
FACTORS = {unit: (kind, factor) for kind, factor, units in UNITS for unit in units}
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = r"[-+]?\d[\d,.]*(?:[eE][-+]?\d+)?"
NUMBER = re.compile(rf"^[~≈]?\s*({DIGITS})\s*([^\d\s(]*)\s*(?:\(.*\))?$")
IN_TEXT = re.compile(
    rf"(?<![\w.])({DIGITS}|{'|'.join(WORDS)})(?!\w*-\w)\s*(%|×|[A-Za-zµμ-]+)?", re.IGNORECASE
)
ROUNDING = 0.05  # maximum rounding error, as a share of the value


@dataclass(frozen=True)
class Stated:
    """A number in a sentence. Its value is in seconds, in bytes, or a share. `noun` is the word
    after it."""

    value: float
    noun: str
    start: int
    end: int

    def equals(self, known: float, tolerance: float) -> bool:
        """Return whether the number equals one from the run. A count must match exactly, and any
        other number within the tolerance."""
        if is_count(known):
            return self.value == known
        return abs(self.value - known) <= (tolerance + ROUNDING) * abs(known)


def is_count(number: float) -> bool:
    return float(number).is_integer() and abs(number) < 1000


def numbers_in(text: str) -> list[Stated]:
    found = []
    for match in IN_TEXT.finditer(text.replace(":", " ")):
        digits, after = match[1].lower().rstrip(".,"), (match[2] or "").lower()
        number = float(WORDS.index(digits)) if digits in WORDS else read_number(digits)
        _, factor = FACTORS.get(after, ("", 1.0))
        if number is not None:
            noun = "" if after in FACTORS else after
            found.append(Stated(number * factor, noun, match.start(1), match.end(1)))
    return found


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
