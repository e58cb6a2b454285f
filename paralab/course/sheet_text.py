"""Parse a student's sheet into parts with tables and answers.

Headings may be shortened ("Part 3"), questions may be reduced to a letter ("a)"), and tables may be
in any order. A question is a bold line, a heading without a table below it, or a line that starts
with a letter and a parenthesis. The text after a question is its answer. A line "Predicted: …" is a
prediction.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

from paralab.errors import UsageError

# The preset "zero" does not parse lists or quotes, so they remain text.
MARKDOWN = MarkdownIt("zero").enable(["heading", "table"])
BOLD = re.compile(r"\*\*(.+?)\*\*(.*)", re.DOTALL)
# `Part 3: Compare`, `part 3`, or `3. Compare`
PART = re.compile(r"^\W*(?:part\s*(\d+)\b|(\d{1,2})\s*(?:[.:)]|$))", re.IGNORECASE)
LABEL = re.compile(r"^[\s*_-]*\(?(?:([a-h])[).:]|(q\d+)\b)", re.IGNORECASE)
LARGEST_BYTES = 10**6  # a filled-in sheet has 10 KB
PREDICTED = re.compile(r"^predict(?:ed|ion):", re.IGNORECASE)


@dataclass
class WrittenPart:
    tables: list[list[list[str]]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    predictions: dict[str, str] = field(default_factory=dict)


def read_sheet(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise UsageError(f"{path} is too large for a sheet.", fix="pass a sheet of up to 1 MB")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fix = "pass a Markdown file in UTF-8, such as one from `paralab practical N --blank FILE`"
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"Cannot read {path}: {reason}.", fix=fix) from error


def parse(text: str) -> dict[int, WrittenPart]:
    """Return a sheet's parts by number."""
    parts: dict[int, WrittenPart] = {}
    current: WrittenPart | None = None
    question: str | None = None

    for kind, content in _pieces(text):
        part = PART.match(str(content)) if kind in ("heading", "bold") else None
        if part and (part[1] or kind == "heading"):
            number = int(part[1] or part[2])
            current, question = parts.setdefault(number, WrittenPart()), None
        elif current is None:
            continue
        elif isinstance(content, list):
            if question is not None and not current.answers[question]:
                del current.answers[question]  # this heading was the table's title
            current.tables.append(content)
            question = None
        elif kind in ("heading", "bold"):
            question = content
            current.answers.setdefault(question, "")
        elif question is not None and PREDICTED.match(content):
            current.predictions[question] = PREDICTED.sub("", content).strip()
        elif question is not None:
            current.answers[question] = f"{current.answers[question]} {content}".strip()
    return parts


def _pieces(text: str) -> Iterator[tuple[str, str | list[list[str]]]]:
    """Yield each piece's kind (heading, bold, text, or table), and its text or its rows."""
    for node in SyntaxTreeNode(MARKDOWN.parse(text)).children:
        if node.type == "heading":
            yield "heading", _words(node.children[0])
        elif node.type == "table":
            rows = [row.children for part in node.children for row in part.children]
            yield "table", [[_words(cell.children[0]) for cell in row] for row in rows]
        elif node.type == "paragraph":
            yield from _paragraph(node.children[0])


def _paragraph(inline: SyntaxTreeNode) -> Iterator[tuple[str, str]]:
    """Split a paragraph into a question (in bold, or labeled like `a)`) and its answer."""
    bold = BOLD.match(_words(inline))
    if bold:
        yield "bold", bold[1].strip()
    for line in [bold[2]] if bold else unescape(inline.content).splitlines():
        labeled = None if bold else LABEL.match(line)
        asked, mark, answer = line.partition("?") if labeled else ("", "", line)
        if labeled and not mark:  # `a) No.`
            asked, answer = line[: labeled.end()], line[labeled.end() :]
        if asked:
            yield "bold", asked + mark
        if answer.strip():
            yield "text", " ".join(answer.split())


def label(question: str) -> str:
    """Return `a` for `a) Is it faster?`, and `q1` for `Q1 How many?`."""
    match = LABEL.match(question)
    return (match[1] or match[2]).lower() if match else ""


def _words(inline: SyntaxTreeNode) -> str:
    return " ".join(unescape(inline.content).split())
