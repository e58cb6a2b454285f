"""Create tables, and table cells from numbers: the text, the value, and the spread over repetitions.
A count has no spread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from paralab.analyse.blocks import Cell, Table
from paralab.analyse.compare import Row
from paralab.analyse.confidence import Ratio
from paralab.analyse.phrases import factor, interval, share, split_words
from paralab.units import rate, seconds, size

Cells = dict[str, Cell]  # one table row: column name -> cell


def table(title: str, rows: Iterable[Cells], note: str = "") -> Table:
    made = list(rows)
    columns = tuple(made[0]) if made else ()
    return Table(title, columns, tuple(tuple(cells.values()) for cells in made), note)


def number(value: float | None, show: Callable[[float | None], str]) -> Cell:
    return Cell(show(value), value)


def percent(value: float | None, unknown: str = "–") -> Cell:
    return Cell(unknown if value is None else f"{value:.0%}", value)


def name(text: object) -> Cell:
    return Cell(str(text), str(text))


def exact(number: float | None, why_not: str = "") -> Cell:
    """Create a cell for a count."""
    if number is None:
        return missing(why_not)
    shown = int(number) if float(number).is_integer() else round(float(number), 3)
    return Cell(str(shown), shown)


def missing(why: str) -> Cell:
    return Cell(f"not measured: {why}" if why else "not measured", None)


def step_time(row: Row) -> Cell:
    times = row.step_seconds
    return Cell(seconds(times.median), times.median, times.p10, times.p90)


def duration(value: float | None, why_not: str = "") -> Cell:
    return missing(why_not) if value is None else Cell(seconds(value), value, value, value)


def held_bytes(value: float | None, why_not: str = "") -> Cell:
    """Create a cell for counted bytes, which are the same in all runs."""
    return missing(why_not) if value is None else Cell(size(value), int(value))


def measured_share(value: float | None, why_not: str = "") -> Cell:
    return missing(why_not) if value is None else Cell(share(value), value, value, value)


def per_second(value: float | None) -> Cell:
    return missing("") if value is None else Cell(rate(value), value, value, value)


def ratio(of: Ratio | None, why_not: str = "") -> Cell:
    """Create a speed-up cell: `1.87 (1.80–1.95)`."""
    if of is None:
        return missing(why_not)
    low, high = (of.value, of.value) if of.low is None or of.high is None else (of.low, of.high)
    return Cell(f"{factor(of.value)} {interval(of)}", of.value, low, high)


def split(sizes: Sequence[int]) -> Cell:
    return Cell(split_words(sizes), split_words(sizes))


def words(text: object) -> Cell:
    """Create a cell for text that students may phrase differently (a goal) or that changes between
    runs (a process id)."""
    return Cell(str(text))


def yes_no(value: bool | None) -> Cell:
    return Cell("unclear" if value is None else "yes" if value else "no", value)
