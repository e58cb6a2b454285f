"""Create tables and their cells: the text, the value, and its spread. A count has no spread."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

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


def number(
    value: float | None, show: Callable[[float], str], unknown: str = "not measured"
) -> Cell:
    return Cell(unknown if value is None else show(value), value)


def percent(value: float | None, unknown: str = "–") -> Cell:
    return number(value, "{:.0%}".format, unknown)


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


def _measured(show: Callable[[float], str], value: float | None, why_not: str = "") -> Cell:
    return missing(why_not) if value is None else Cell(show(value), value, value, value)


duration = partial(_measured, seconds)
measured_share = partial(_measured, share)
per_second = partial(_measured, rate)


def held_bytes(value: float | None, why_not: str = "") -> Cell:
    """Create a cell for counted bytes, which are the same in all runs."""
    return missing(why_not) if value is None else Cell(size(value), int(value))


def ratio(of: Ratio | None, why_not: str = "") -> Cell:
    """Create a speed-up cell: `1.87 (1.80–1.95)`."""
    if of is None:
        return missing(why_not)
    low, high = (of.value, of.value) if of.low is None or of.high is None else (of.low, of.high)
    return Cell(f"{factor(of.value)} {interval(of)}", of.value, low, high)


def split(sizes: Sequence[int]) -> Cell:
    return name(split_words(sizes))


def words(text: object) -> Cell:
    """Create a cell for text that students may phrase differently, or that changes between runs."""
    return Cell(str(text))


def yes_no(value: bool | None) -> Cell:
    return Cell("unclear" if value is None else "yes" if value else "no", value)
