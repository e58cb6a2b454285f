"""The check of this machine in the terminal: facts and verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from paralab.doctor.finding import Looked
from paralab.show.console import plain_table, show_table

STYLES = {"error": "bold red", "warning": "bold yellow", "suspect": "bold cyan", "good": "green"}


def print_looked(rows: Sequence[Looked]) -> None:
    if not rows:
        return
    table = plain_table("what", "value", "verdict")
    for row in rows:
        table.add_row(
            row.name,
            Text(row.value or ""),
            Text(row.verdict, STYLES.get(row.verdict.split()[0], "dim")),
        )
    show_table(table)
