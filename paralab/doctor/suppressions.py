"""Comments that silence a finding: `# paralab: ignore[G01] reason`, at the end of the line or alone
on the line before it.

A comment covers its whole statement, because a formatter may split the statement across lines. Case
and spaces do not matter, so a comment that looks right works.
"""

import io
import re
import tokenize
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from paralab.doctor.catalog import ENTRIES
from paralab.doctor.registry import Finding
from paralab.doctor.sources import Sources

COMMENT = re.compile(
    r"#\s*paralab\s*(?::\s*ignore\b|ignore(?=\s*\[))\s*(?:\[(?P<ids>[^\]]*)\])?[\s:,–-]*(?P<reason>.*)$",
    re.IGNORECASE,
)
LAYOUT = (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@dataclass(frozen=True)
class Ignore:
    file: str
    line: int
    ids: tuple[str, ...]
    reason: str
    lines: range  # the lines of the statement that it silences

    def silences(self, finding: Finding) -> bool:
        return finding.id in self.ids and finding.line is not None and finding.line in self.lines

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Ignored:
    """A finding that is not reported, what silenced it, and the reason given."""

    finding: Finding
    by: Literal["comment", "per-file-ignores", "baseline"]
    reason: str


def find_comments(file: str, text: str) -> list[Ignore]:
    """Return every silencing comment in a script, ignoring text in strings."""
    if "paralab" not in text.lower():
        return []
    waiting: list[tuple[int, re.Match[str]]] = []
    comments: list[Ignore] = []
    first: int | None = None  # the line on which the current statement begins
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                match = COMMENT.search(token.string)
                if match:
                    waiting.append((token.start[0], match))
            elif token.type == tokenize.NEWLINE:
                comments += [
                    _parse(file, line, match, range(first or line, token.end[0] + 1))
                    for line, match in waiting
                ]
                waiting, first = [], None
            elif token.type not in LAYOUT and first is None:
                first = token.start[0]
    except (tokenize.TokenError, SyntaxError):
        pass  # the parser reports invalid Python
    return comments + [_parse(file, line, match, range(line, line + 1)) for line, match in waiting]


def _parse(file: str, line: int, match: re.Match[str], lines: range) -> Ignore:
    ids = tuple(id.strip().upper() for id in (match["ids"] or "").split(",") if id.strip())
    return Ignore(file, line, ids, match["reason"].strip(), lines)


class Comments:
    """The comments in every file that a finding points to, read on demand."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._by_file: dict[str, list[Ignore]] = {}
        self._used: set[tuple[Ignore, str]] = set()

    def in_file(self, file: str) -> list[Ignore]:
        if file not in self._by_file:
            text = self._sources.text(file) if file.endswith(".py") else None
            self._by_file[file] = find_comments(file, text or "")
        return self._by_file[file]

    def silencing(self, finding: Finding) -> Ignore | None:
        if not finding.file:
            return None
        comments = self.in_file(finding.file)
        comment = next((each for each in comments if each.silences(finding)), None)
        if comment:
            self._used.add((comment, finding.id))
        return comment

    def notes(self, files: Iterable[str], ids: Collection[str]) -> list[str]:
        """Return mistakes in the comments themselves. `ids` are the failures that were checked."""
        notes = []
        for comment in (each for file in dict.fromkeys(files) for each in self.in_file(file)):
            if not comment.ids:
                notes.append(
                    f"{comment.place}: the comment does not name an id, so it silences nothing. "
                    "Write ignore[ID] and a reason."
                )
            elif not comment.reason:
                notes.append(
                    f"{comment.place}: ignore[{', '.join(comment.ids)}] has no reason. "
                    "Write one after the bracket."
                )
            for id in comment.ids:
                if id not in ENTRIES:
                    notes.append(f"{comment.place}: there is no failure {id!r}.")
                elif id in ids and (comment, id) not in self._used:
                    notes.append(f"{comment.place}: ignore[{id}] silences nothing. Remove it.")
        return notes
