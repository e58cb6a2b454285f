"""Read numbers the way students write them: `39,7 ms`, `0.0397 s`, `1,768`, `94%`, `two`."""

import math
import re
from dataclasses import dataclass

UNITS = (
    ("number", 1.0, ("", "×", "x", "times")),
    ("time", 1.0, ("s", "sec", "second", "seconds")),
    ("time", 60.0, ("min", "minute", "minutes")),
    ("time", 1e-3, ("ms", "msec", "millisecond", "milliseconds")),
    ("time", 1e-6, ("µs", "μs", "us", "microsecond", "microseconds")),
    ("size", 1.0, ("b", "byte", "bytes")),
    *(("size", 10.0**power, (unit,)) for power, unit in ((3, "kb"), (6, "mb"), (9, "gb"))),
    *(("size", 2.0**power, (unit,)) for power, unit in ((10, "kib"), (20, "mib"), (30, "gib"))),
    ("share", 0.01, ("%", "percent")),
)
FACTORS = {unit: (kind, factor) for kind, factor, units in UNITS for unit in units}
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = r"[-+]?\d[\d,.]*(?:[eE][-+]?\d{1,2}(?!\d))?"
ABOUT = r"(?:[~≈=]|about|approx\w*\.?|around|roughly|circa|ca\.)?"
# A number, its unit, and a remark: `39.7 ms (median)`, `39.7 ms ± 2`, `1350 samples/s`.
NUMBER = re.compile(
    rf"^{ABOUT}\s*({DIGITS}|(?:{'|'.join(WORDS)}|none)\b)\s*([^\d\s(/±+;]*)\s*(?:[(±/+].*|\D*)$",
    re.IGNORECASE,
)
IN_TEXT = re.compile(
    rf"(?<![\w.])({DIGITS}|{'|'.join(WORDS)})(?!\w*-\w)\s*(%|×|[A-Za-zµμ-]+)?", re.IGNORECASE
)
FLOAT = re.compile(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?")
ROUNDING = 0.05  # largest rounding error, as a share of the value


@dataclass(frozen=True)
class Stated:
    """A number in a sentence or a cell, in seconds, in bytes, or as a share. `noun` is the word
    after it, unless that is a unit."""

    value: float
    noun: str
    start: int = 0
    end: int = 0
    step: float = 0.0  # the place value of its last digit
    kind: str = ""

    def equals(self, known: float, tolerance: float) -> bool:
        """Return whether this equals a number from the run. Counts must match exactly."""
        if is_count(known):
            return self.value == known
        return abs(self.value - known) <= (tolerance + ROUNDING) * abs(known)


def is_count(number: float) -> bool:
    return float(number).is_integer() and abs(number) < 1000


def numbers_in(text: str) -> list[Stated]:
    """Find the numbers in a sentence. In `1.4-1.6`, the hyphen is not a sign."""
    numbers = []
    for match in IN_TEXT.finditer(re.sub(r"(?<=\d)-(?=\d)|:", " ", text)):
        after = (match[2] or "").lower()
        kind, factor = FACTORS.get(after, ("", 1.0))
        noun = "" if after in FACTORS else after
        for digits in readings(match[1].rstrip(".,"))[:1]:
            value = float(digits) * factor
            numbers.append(Stated(value, noun, *match.span(1), kind=kind))
    return numbers


def quantities(words: str) -> list[Stated]:
    """Read a cell: `34.6 ms` is (0.0346, step 0.0001, "time"). Return one interpretation, two if
    the separator may be a decimal comma (`1,020 s`), or none if this is not a number."""
    match = NUMBER.match(words.replace("`", "").strip().rstrip(".,"))
    if not match:
        return []
    noun = match[2].lower()
    kind, factor = FACTORS.get(noun, ("", 1.0))
    numbers = []
    for digits in readings(match[1]):
        mantissa, _, exponent = digits.partition("e")
        decimals = len(mantissa.partition(".")[2])
        worth = 10.0 ** (int(exponent or 0) - decimals) * factor
        step = worth if factor != 1.0 or decimals else 0.0
        numbers.append(Stated(float(digits) * factor, "" if kind else noun, step=step, kind=kind))
    return [number for number in numbers if math.isfinite(number.value)]


def readings(written: str) -> list[str]:
    """Return the possible meanings of a number, the most likely first: `1,768` is 1768 or 1.768,
    `39,7` is 39.7, and `1.234,5` is 1234.5."""
    digits = written.lower()
    digits = str(WORDS.index(digits)) if digits in WORDS else digits.replace("none", "0")
    last = max(digits.rfind(","), digits.rfind("."))
    joined = digits.replace(",", "").replace(".", "")
    if "," in digits and "." in digits:
        possible = [f"{digits[:last].replace(',', '').replace('.', '')}.{digits[last + 1 :]}"]
    elif re.fullmatch(r"[-+]?[1-9]\d{0,2}([,.]\d{3})+", digits):
        point = digits.replace(",", ".")
        possible = [joined, point] if "," in digits else [point, joined]
    else:
        possible = [digits.replace(",", ".")]
    return [each for each in possible if FLOAT.fullmatch(each) and math.isfinite(float(each))]
