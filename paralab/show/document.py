"""Print a document in the terminal: the verdict, then tables and answers. Charts appear only on the
page."""

from __future__ import annotations

from rich.markup import escape

from paralab.analyse.blocks import Answer, Bar, Bars, Document, Finding, Table
from paralab.show.console import console, plain_table, show_table
from paralab.show.page import cell_words, numeric_columns

STYLE = {"warning": "red", "next": "cyan", "fastest": "green", "same": "green"}
BAR_WIDTH = 40
DETAILS = ("per device", "efficiency")  # omitted in a terminal for lack of room


def print_document(document: Document) -> None:
    console.print(
        f"[bold]{escape(document.title)}[/]  [dim]{escape(document.subtitle)}[/]", soft_wrap=True
    )
    for section in document.sections:
        if not any(isinstance(block, Table | Answer | Bars) for block in section.blocks):
            continue
        console.print(f"\n[bold]{escape(section.title)}[/]")
        if section.text:
            console.print(escape(section.text.replace("`", "")), soft_wrap=True)
        for block in section.blocks:
            if isinstance(block, Table):
                print_table(block)
            elif isinstance(block, Answer):
                print_answer(block)
            elif isinstance(block, Bars):
                print_bars(block)
    if document.findings:
        console.print()
    for finding in document.findings:
        print_finding(finding)


def print_summary(document: Document) -> None:
    """Print the first table, narrow enough for a terminal, and the verdict."""
    console.print(
        f"[bold]{escape(document.title)}[/]  [dim]{escape(document.subtitle)}[/]", soft_wrap=True
    )
    first = next(
        (
            block
            for section in document.sections
            for block in section.blocks
            if isinstance(block, Table)
        ),
        None,
    )
    if first:
        kept = [place for place, column in enumerate(first.columns) if column not in DETAILS]
        rows = tuple(tuple(row[place] for place in kept) for row in first.rows)
        print_table(Table("", tuple(first.columns[place] for place in kept), rows, first.note))
    for finding in document.findings:
        print_finding(finding)


def print_table(table: Table) -> None:
    numeric = numeric_columns(table)
    right = tuple(
        column for column, is_number in zip(table.columns, numeric, strict=True) if is_number
    )
    shown = plain_table(*map(escape, table.columns), right=tuple(map(escape, right)))
    for row in table.rows:
        shown.add_row(*(escape(cell_words(cell).replace("`", "")) for cell in row))
    if table.title:
        console.print(f"[dim]{escape(table.title)}[/]", soft_wrap=True)
    show_table(shown)
    if table.note:
        console.print(f"[dim]{escape(table.note.replace('`', ''))}[/]", soft_wrap=True)


def print_answer(answer: Answer) -> None:
    console.print(f"[bold]{escape(answer.question)}[/]", soft_wrap=True)
    if answer.prediction:
        console.print(f"  [dim]Predicted: {escape(answer.prediction)}[/]", soft_wrap=True)
    verdict = "" if answer.verdict is None else "Yes. " if answer.verdict else "No. "
    console.print(f"  {verdict}{escape(answer.text.replace('`', ''))}", soft_wrap=True)


def print_bars(bars: Bars) -> None:
    """Print bars made of characters, all on one scale."""
    known = [bar.value for bar in bars.bars if bar.value is not None]
    if not known:
        return
    table = plain_table("", "", "")
    for bar in bars.bars:
        table.add_row(escape(bar.label), _characters(bar, max(known)), escape(bar.text))
    console.print(f"[dim]{escape(bars.title)}[/]", soft_wrap=True)
    show_table(table)


def _characters(bar: Bar, largest: float) -> str:
    return "█" * max(1, round(BAR_WIDTH * bar.value / largest)) if bar.value and largest > 0 else ""


def print_finding(finding: Finding) -> None:
    style = STYLE.get(finding.kind, "bold")
    console.print(
        f"[{style}]{finding.kind}:[/] {escape(finding.text.replace('`', ''))}", soft_wrap=True
    )
