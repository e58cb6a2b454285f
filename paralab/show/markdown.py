"""A document as Markdown: a lab sheet to hand in, or to paste into an issue. Tables and answers; pictures are for the page."""

from __future__ import annotations

from paralab.analyse.blocks import Answer, Document, Table
from paralab.show.page import cell_words, numeric_columns


def as_markdown(document: Document) -> str:
    lines = [f"# {document.title}", "", document.subtitle, ""]
    lines += [f"- **{finding.kind}**: {finding.text}" for finding in document.findings]
    for section in document.sections:
        blocks = [block for block in section.blocks if isinstance(block, Table | Answer)]
        if not blocks:
            continue
        lines += ["", f"## {section.title}", ""] + ([section.text, ""] if section.text else [])
        for block in blocks:
            lines += _table(block) if isinstance(block, Table) else _answer(block)
    lines += ["", "## What these numbers depend on", ""]
    lines += [f"- {name}: {value}" for name, value in document.facts]
    return "\n".join(lines) + "\n"


def _table(table: Table) -> list[str]:
    align = ["---:" if numeric else "---" for numeric in numeric_columns(table)]
    rows = [[cell_words(cell).replace("|", "\\|") for cell in row] for row in table.rows]
    lines = [_row(list(table.columns)), _row(align), *map(_row, rows)]
    return ([f"**{table.title}**", ""] if table.title else []) + lines + (["", table.note] if table.note else []) + [""]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _answer(answer: Answer) -> list[str]:
    verdict = "" if answer.verdict is None else "Yes. " if answer.verdict else "No. "
    return [f"**{answer.question}**", "", f"{verdict}{answer.text}", ""]
