"""Create tables and their cells: the text, the value, and its spread. A count has no spread."""

from collections.abc import Callable, Iterable

from paralab.analyse.blocks import Cell, Table

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


def missing(why: str) -> Cell:
    return Cell(f"not measured: {why}" if why else "not measured", None)


def exact(value: float | None, why_not: str = "") -> Cell:
    """Create a cell for a count."""
    if value is None:
        return missing(why_not)
    shown = int(value) if float(value).is_integer() else round(float(value), 3)
    return Cell(str(shown), shown)


def measured(value: float | None, show: Callable[[float], str], why_not: str = "") -> Cell:
    """Create a cell for a number that differs between runs, so a student's number may differ."""
    return missing(why_not) if value is None else Cell(show(value), value, value, value)


def words(text: object) -> Cell:
    """Create a cell for text that students may phrase differently, or that changes between runs."""
    return Cell(str(text))
