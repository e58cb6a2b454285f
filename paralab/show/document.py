"""Print a document in the terminal: its tables and answers. Charts appear only on the page."""

from collections.abc import Sequence

from msgspec.structs import replace
from rich.markup import escape
from rich.table import Table as Drawn

from paralab.analyse.blocks import Answer, Bars, Document, Finding, Shares, Table
from paralab.show.chart_shares import as_table
from paralab.show.console import console, fits, plain_table, say, show_table
from paralab.show.page import cell_words, finding_color, numeric_columns

STYLE = {"warning": "red", "next": "cyan", "fastest": "green", "same": "green"}
BAR_WIDTH = 40
# A terminal narrower than this has no room for these columns.
DETAILS, WIDE = ("per device", "efficiency"), 132
# A terminal in which a table would break words does not show these, in this order.
NEXT = ("samples/s", "devices", "memory", "communication")


def print_document(document: Document) -> None:
    _print_title(document)
    for section in document.sections:
        shown = (as_table(b) if isinstance(b, Shares) else b for b in section.blocks)
        blocks = [block for block in shown if isinstance(block, Table | Answer | Bars)]
        if not blocks:
            continue
        say(f"\n[bold]{escape(section.title)}[/]")
        if section.text:
            say(_prose(section.text))
        for number, block in enumerate(blocks):
            if number and not isinstance(block, Answer):
                console.print()
            if isinstance(block, Table):
                _print_table(block)
            elif isinstance(block, Answer):
                _print_answer(block)
            else:
                _print_bars(block)
    if document.findings:
        console.print()
    _print_findings(document.findings)


def print_summary(document: Document) -> None:
    """Print the first table, narrow enough for a terminal, and the verdict."""
    _print_title(document)
    for table in [table for section in document.sections for table in section.of(Table)][:1]:
        _print_table(replace(table, title=""))
    _print_findings(document.findings)


def _prose(text: str) -> str:
    return escape(text.replace("`", ""))


def _print_title(document: Document) -> None:
    say(f"[bold]{escape(document.title)}[/]  [dim]{escape(document.subtitle)}[/]")


def _print_table(table: Table) -> None:
    if table.title:
        say(f"[dim]{escape(table.title)}[/]")
    crowded = console.width < WIDE and set(DETAILS) <= set(table.columns)
    hidden = DETAILS if crowded else ()
    drawn = _draw(table, hidden)
    for column in NEXT if crowded else ():
        if fits(drawn, console.width):
            break
        hidden = (*hidden, column)
        drawn = _draw(table, hidden)
    show_table(drawn)
    note = table.note
    if left_out := [column for column in hidden if column in NEXT]:
        note = f"no room for: {', '.join(left_out)}; {note}"
    if note:
        say(f"[dim]{_prose(note)}[/]")


def _draw(table: Table, hidden: Sequence[str]) -> Drawn:
    """Return a table of the terminal without the hidden columns."""
    shown = [place for place, column in enumerate(table.columns) if column not in hidden]
    columns = [escape(column) for column in table.columns]
    numeric = zip(columns, numeric_columns(table), strict=True)
    right = [column for column, is_number in numeric if is_number]
    drawn = plain_table(*(columns[place] for place in shown), right=right)
    for row in table.rows:
        drawn.add_row(*(_prose(cell_words(row[place])) for place in shown))
    return drawn


def _print_answer(answer: Answer) -> None:
    say(f"[bold]{escape(answer.question)}[/]")
    if answer.prediction:
        say(f"[dim]Predicted: {escape(answer.prediction)}[/]", indent=2)
    verdict = "" if answer.verdict is None else "Yes. " if answer.verdict else "No. "
    say(f"{verdict}{_prose(answer.text)}", indent=2)


def _print_bars(bars: Bars) -> None:
    """Print text bars that start at a zero line. A second line marks the reference."""
    values = [bar.value for bar in bars.bars if bar.value is not None]
    if not values:
        return
    per_character = max(*values, bars.reference or 0.0) / BAR_WIDTH
    mark = round(bars.reference / per_character) - 1 if bars.reference and per_character else -1
    table = plain_table("label", "bar", "text", header=False)
    for bar in bars.bars:
        drawn = max(1, round(bar.value / per_character)) if bar.value and per_character > 0 else 0
        cells = list("█" * drawn + " " * (BAR_WIDTH - drawn))
        if mark >= drawn:
            cells[mark] = "┊"
        table.add_row(escape(bar.label), "│" + "".join(cells), escape(bar.text))
    say(f"[dim]{escape(bars.title)}[/]")
    show_table(table)


def _print_findings(findings: tuple[Finding, ...]) -> None:
    for finding in findings:
        style = STYLE.get(finding_color(finding), "bold")
        say(f"[{style}]{finding.kind}:[/] {_prose(finding.text)}")
