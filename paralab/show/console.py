"""The output consoles: results go to stdout, and progress and notes go to stderr."""

import re
import sys
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import render
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from paralab.show.visible import visible

GAP = 2  # spaces between the columns of a table
PIPED_WIDTH = 130  # for pipes and files, which have no width; fits the default table


class VisibleConsole(Console):
    """Shows control characters in printed text as symbols. Rich's own control codes still work."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPED_WIDTH
    return VisibleConsole(stderr=stderr, highlight=False, width=width)


console = _console(stderr=False)
errors = _console(stderr=True)


def say(text: str, indent: int = 0) -> None:
    """Print a paragraph on stdout. A terminal breaks lines between words; a file gets one line."""
    if console.is_terminal:
        console.print(Padding(render(text), (0, 0, 0, indent), expand=False))
    else:
        console.print(" " * indent + text, soft_wrap=True)


def print_table(
    columns: Sequence[str], rows: Iterable[Iterable[str]], right: Sequence[str] = ()
) -> None:
    """Print a table. The columns named in `right` contain numbers."""
    table = plain_table(*columns, right=right)
    for row in rows:
        table.add_row(*row)
    show_table(table)


def print_facts(facts: Iterable[tuple[str, str]], style: str = "dim") -> None:
    """Print names and their values, with the names in this style."""
    table = fact_table(style)
    for name, value in facts:
        table.add_row(name, value)
    show_table(table)


def show_table(table: Table) -> None:
    """Print a table. If stdout is a file or a pipe, strip trailing spaces."""
    set_widths(table, console.width)
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as text:
        console.print(table)
    for line in text.get().splitlines():
        print(line.rstrip(), flush=True)  # progress goes to stderr


def set_widths(table: Table, room: int) -> None:
    """Set the width of each column, so that lines break only between words."""
    texts = [_texts(column) for column in table.columns]
    natural = [max(map(cell_len, column), default=0) for column in texts]
    least = [_least(column) for column in table.columns]
    for column, width in zip(
        table.columns, fit(natural, least, _inside(room, natural)), strict=True
    ):
        column.width = width


def fits(table: Table, room: int) -> bool:
    """Return whether a table can be this narrow without a break in a word."""
    least = [_least(column) for column in table.columns]
    return sum(least) <= _inside(room, least)


def fit(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return the widths of columns that share the room. The widest shrinks first, and none becomes
    narrower than its longest word:

        natural  28  9  18        least  10  6  11        room 40   ->   15  9  16
    """
    widths = list(natural)
    while sum(widths) > room:
        places = [place for place, width in enumerate(widths) if width > least[place]]
        if not places:
            break
        widths[max(places, key=widths.__getitem__)] -= 1
    return widths


def _texts(column: Column) -> list[str]:
    cells = [*([column.header] if column.header else []), *column.cells]
    lines = [
        cell.plain if isinstance(cell, Text) else render(cell).plain
        for cell in cells
        if isinstance(cell, Text | str)
    ]
    return [line for text in lines for line in text.splitlines()]


def _least(column: Column) -> int:
    """Return the length of a column's longest word. A number and its unit are one word."""
    header, *cells = _texts(column) or [""]
    gaps = r" (?=\()" if column.justify == "right" else " "
    words = [*header.split(), *(word for cell in cells for word in re.split(gaps, cell))]
    return max(map(cell_len, words), default=0)


def _inside(room: int, columns: Sequence[object]) -> int:
    return room - GAP * (len(columns) - 1)


def plain_table(*columns: str, right: Sequence[str] = (), header: bool = True) -> Table:
    """Create a borderless table. The columns named in `right` contain numbers."""
    table = Table(
        box=None, show_header=header, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim"
    )
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def fact_table(style: str = "dim") -> Table:
    """Create a table with two columns: a name and its value."""
    table = plain_table("what", "value", header=False)
    table.columns[0].style = style
    return table
