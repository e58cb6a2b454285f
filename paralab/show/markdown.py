"""Render a document as Markdown: a lab sheet to hand in, or text to paste into an issue. Charts
appear only on the page.

A document may contain text from someone else's run folder, so this module escapes everything. The
output contains no HTML and no links, and each text stays on one line.
"""

import re

from paralab.analyse.blocks import Answer, Document, Shares, Table
from paralab.show.chart_shares import as_table
from paralab.show.page import cell_words, numeric_columns
from paralab.show.visible import visible

# Use entities, because a backslash in the text would cancel an escaping backslash. Only characters
# that form tags, cells, or links need escaping.
UNSAFE = re.compile(r"<|\||\](?=[(\[:])")


def as_markdown(document: Document) -> str:
    lines = [f"# {safe(document.title)}", "", safe(document.subtitle), ""]
    lines += [f"- **{safe(finding.kind)}**: {safe(finding.text)}" for finding in document.findings]
    for section in document.sections:
        shown = (as_table(b) if isinstance(b, Shares) else b for b in section.blocks)
        blocks = [block for block in shown if isinstance(block, Table | Answer)]
        if not blocks:
            continue
        text = [safe(section.text), ""] if section.text else []
        lines += ["", f"## {safe(section.title)}", "", *text]
        for block in blocks:
            lines += _table(block) if isinstance(block, Table) else _answer(block)
    if document.facts:
        lines += ["", "## What these numbers depend on", ""]
    lines += [f"- {safe(name)}: {safe(value)}" for name, value in document.facts]
    return "\n".join(lines) + "\n"


def safe(text: str) -> str:
    one_line = visible(" ".join(str(text).splitlines()))
    return UNSAFE.sub(lambda found: f"&#{ord(found[0])};", one_line)


def _table(table: Table) -> list[str]:
    align = ["---:" if numeric else "---" for numeric in numeric_columns(table)]
    rows = [[safe(cell_words(cell)) for cell in row] for row in table.rows]
    lines = [_row([safe(column) for column in table.columns]), _row(align), *map(_row, rows)]
    title = [f"**{safe(table.title)}**", ""] if table.title else []
    return [*title, *lines, *(["", safe(table.note)] if table.note else []), ""]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _answer(answer: Answer) -> list[str]:
    verdict = {None: "", True: "Yes. ", False: "No. "}[answer.verdict]
    predicted = [f"Predicted: {safe(answer.prediction)}", ""] if answer.prediction else []
    return [f"**{safe(answer.question)}**", "", *predicted, f"{verdict}{safe(answer.text)}", ""]
