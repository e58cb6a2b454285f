"""A checked lab sheet in the terminal: a line per contradiction, with the reason."""

from __future__ import annotations

from rich.markup import escape

from paralab.course.check import CheckedValue, CheckResult
from paralab.show.console import console
from paralab.units import plural


def print_checked(result: CheckResult) -> None:
    for entry in result.contradictions:
        console.print(f"[red]contradiction[/] {escape(_place(entry))}", soft_wrap=True)
        run = f", the run has {entry.run}" if entry.column else f", the run says {entry.run}"
        console.print(
            f"  you wrote {escape(_short(entry.written or ''))}{escape(run)}: {escape(entry.reason)}",
            soft_wrap=True,
        )
    for entry in result.missing:
        console.print(f"[yellow]missing[/] {escape(_place(entry))}", soft_wrap=True)
    for title in result.not_in_this_run:
        console.print(f"[dim]not in this run: {escape(title)}[/]", soft_wrap=True)
    checked = plural(result.checked, "value")
    wrong = plural(len(result.contradictions), "contradiction")
    missing = plural(len(result.missing), "missing value")
    console.print(
        f"{checked} compared with {escape(result.run_folder or '')}: {wrong}, {missing}.",
        soft_wrap=True,
    )


def _place(entry: CheckedValue) -> str:
    return " · ".join(
        part for part in (entry.section, entry.table, entry.row, entry.column) if part
    )


def _short(words: str) -> str:
    return words if len(words) <= 60 else words[:59] + "…"
