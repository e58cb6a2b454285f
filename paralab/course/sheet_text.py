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
from markdown_it.token import Token

from paralab.errors import UsageError

# Parse only headings and tables; "zero" leaves lists and quotes as text.
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
            raise UsageError(f"{path} is too large for a sheet.", fix="a sheet of up to 1 MB")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fix = "a Markdown file in UTF-8, such as one from `paralab practical N --blank FILE`"
        raise UsageError(f"Cannot read {path}: {error}.", fix=fix) from error


def parse(text: str) -> dict[int, WrittenPart]:
    """Return a sheet's parts by number."""
    parts: dict[int, WrittenPart] = {}
    current: WrittenPart | None = None
    question: str | None = None

    for kind, content in _pieces(MARKDOWN.parse(text)):
        found = PART.match(str(content)) if kind in ("heading", "bold") else None
        if found and (found[1] or kind == "heading"):
            number = int(found[1] or found[2])
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


def _pieces(tokens: list[Token]) -> Iterator[tuple[str, str | list[list[str]]]]:
    """Yield each piece of the sheet in order: its kind (heading, bold, text, or table), and its
    text or its rows."""
    place = 0
    while place < len(tokens):
        token = tokens[place]
        if token.type == "heading_open":
            yield "heading", _words(tokens[place + 1])
        elif token.type == "table_open":
            rows: list[list[str]] = []
            while tokens[place].type != "table_close":
                if tokens[place].type == "tr_open":
                    rows.append([])
                elif tokens[place].type == "inline":
                    rows[-1].append(_words(tokens[place]))
                place += 1
            yield "table", rows
        elif token.type == "paragraph_open":
            yield from _paragraph(tokens[place + 1])
        place += 1


def _paragraph(inline: Token) -> Iterator[tuple[str, str]]:
    """Split a paragraph into question and answer. It may start with its question, in bold or as
    `a)`."""
    found = BOLD.match(_words(inline))
    if found:
        yield "bold", found[1].strip()
    for line in [found[2]] if found else unescape(inline.content).splitlines():
        labeled = None if found else LABEL.match(line)
        asked, mark, answer = line.partition("?") if labeled else ("", "", line)
        if labeled and not mark:  # `a) No.`
            asked, answer = line[: labeled.end()], line[labeled.end() :]
        if asked:
            yield "bold", asked + mark
        if answer.strip():
            yield "text", " ".join(answer.split())


def label(question: str) -> str:
    """Return `a` for `a) Is it faster?`, and `q1` for `Q1 How many?`."""
    found = LABEL.match(question)
    return (found[1] or found[2]).lower() if found else ""


def _words(inline: Token) -> str:
    return " ".join(unescape(inline.content).split())
