"""The output consoles: results go to stdout, and progress and notes go to stderr."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from paralab.show.visible import visible

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


def say(text: str, style: str = "") -> None:
    """Print a line on stdout without wrapping it."""
    console.print(text, style=style or None, soft_wrap=True)


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
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as text:
        console.print(table)
    for line in text.get().splitlines():
        print(line.rstrip(), flush=True)  # progress goes to stderr


def plain_table(*columns: str, right: Sequence[str] = (), header: bool = True) -> Table:
    """Create a borderless table. The columns named in `right` contain numbers."""
    table = Table(
        box=None, show_header=header, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim"
    )
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def fact_table(style: str = "dim") -> Table:
    """Create a table with two columns: a name and its value."""
    table = plain_table("what", "value", header=False)
    table.columns[0].style = style
    return table
