"""Comments that silence a finding: `# paralab: ignore[G01] reason`, on the line or alone on the
line before.

A comment covers the whole statement it belongs to: a formatter may have spread it over several
lines. Capitals and spaces do not matter: a comment that looks as if it silenced must not be passed
over without a word.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from paralab.doctor.catalog import ENTRIES
from paralab.doctor.finding import Finding
from paralab.doctor.sources import Sources

COMMENT = re.compile(
    r"#\s*paralab\s*(?::\s*ignore\b|ignore(?=\s*\[))\s*(?:\[(?P<ids>[^\]]*)\])?[\s:,–-]*(?P<reason>.*)$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ignore:
    file: str
    line: int  # of the comment
    ids: tuple[str, ...]
    reason: str
    lines: range  # of the statement that it silences

    def silences(self, finding: Finding) -> bool:
        return finding.id in self.ids and finding.line is not None and finding.line in self.lines

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Ignored:
    finding: Finding
    by: Ignore


def ignores(file: str, text: str) -> list[Ignore]:
    """All such comments in a script. Text in strings is no comment."""
    if "paralab" not in text.lower():
        return []
    found: list[tuple[int, re.Match[str]]] = []
    made: list[Ignore] = []
    first: int | None = None  # line in which the current statement begins
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                match = COMMENT.search(token.string)
                if match:
                    found.append((token.start[0], match))
            elif token.type == tokenize.NEWLINE:
                made += [
                    _made(file, line, match, range(first or line, token.end[0] + 1))
                    for line, match in found
                ]
                found, first = [], None
            elif (
                token.type
                not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
                and first is None
            ):
                first = token.start[0]
    except (tokenize.TokenError, SyntaxError):
        pass  # a script that is none is told by who reads it
    return made + [_made(file, line, match, range(line, line + 1)) for line, match in found]


def _made(file: str, line: int, match: re.Match[str], lines: range) -> Ignore:
    ids = tuple(id.strip().upper() for id in (match["ids"] or "").split(",") if id.strip())
    return Ignore(file, line, ids, match["reason"].strip(), lines)


class Silence:
    """The comments of all files that findings point to, read when the first finding comes."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._of: dict[str, list[Ignore]] = {}
        self.ignored: list[Ignored] = []

    def of(self, file: str) -> list[Ignore]:
        if file not in self._of:
            self._of[file] = (
                ignores(file, self._sources.text(file) or "") if file.endswith(".py") else []
            )
        return self._of[file]

    def heard(self, finding: Finding) -> bool:
        """False if a comment silences it."""
        by = (
            next((ignore for ignore in self.of(finding.file) if ignore.silences(finding)), None)
            if finding.file
            else None
        )
        if by:
            self.ignored.append(Ignored(finding, by))
        return by is None

    def notes(self, files: Iterable[str], ids: Collection[str]) -> list[str]:
        """What is wrong with the comments themselves. `ids`: what was looked for, so what a comment
        could have silenced."""
        notes = []
        for comment in (comment for file in dict.fromkeys(files) for comment in self.of(file)):
            used = {each.finding.id for each in self.ignored if each.by == comment}
            if not comment.ids:
                notes.append(
                    f"{comment.place}: names no entry, so it silences nothing; write ignore[ID] and a reason."
                )
            elif not comment.reason:
                notes.append(
                    f"{comment.place}: ignore[{', '.join(comment.ids)}] gives no reason; write one after the bracket."
                )
            for id in comment.ids:
                if id not in ENTRIES:
                    notes.append(f"{comment.place}: there is no entry {id!r}.")
                elif id in ids and id not in used:
                    notes.append(
                        f"{comment.place}: ignore[{id}] silences nothing; it can be removed."
                    )
        return notes
