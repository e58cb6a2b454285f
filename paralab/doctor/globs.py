"""Path patterns in .gitignore syntax, for .gitignore files, --exclude, and per-file-ignores."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Pattern:
    """One line of a .gitignore. `expression` matches a path relative to the pattern's folder."""

    expression: re.Pattern[str]
    negated: bool
    only_folders: bool

    def matches(self, path: str, is_folder: bool) -> bool:
        return (is_folder or not self.only_folders) and bool(self.expression.fullmatch(path))


@cache
def compile_pattern(text: str) -> Pattern:
    """Compile a pattern. `build` matches anywhere, `/build` matches only at the top, and `**`
    matches any number of folders."""
    negated = text.startswith("!")
    body = text.removeprefix("!").removeprefix("\\")
    anchored = "/" in body.rstrip("/")
    words = body.strip("/")
    expression = ("" if anchored else "(?:.*/)?") + _translate(words)
    try:
        compiled = re.compile(expression)
    except re.error:  # an unbalanced bracket: match it literally
        compiled = re.compile(re.escape(words))
    return Pattern(compiled, negated, body.endswith("/"))


def compile_patterns(lines: Iterable[str]) -> list[Pattern]:
    """Compile the lines of a .gitignore, except comments and empty lines."""
    kept = (line.rstrip() for line in lines)
    return [compile_pattern(line) for line in kept if line.strip("/!") and line[0] != "#"]


def is_matched(path: str, patterns: Iterable[Pattern], is_folder: bool = False) -> bool:
    """Return whether the patterns match a path. The last match wins, so `!keep.py` undoes earlier
    matches."""
    matched = False
    for pattern in patterns:
        if pattern.matches(path, is_folder):
            matched = not pattern.negated
    return matched


def is_excluded(path: str, patterns: Iterable[Pattern]) -> bool:
    parts = path.split("/")
    folders = ("/".join(parts[:number]) for number in range(1, len(parts)))
    chosen = list(patterns)
    return is_matched(path, chosen) or any(
        is_matched(folder, chosen, is_folder=True) for folder in folders
    )


def _translate(pattern: str) -> str:
    """Translate a pattern to a regular expression. `*` and `?` do not match a slash."""
    found, at = "", 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            found, at = found + "(?:.*/)?", at + 3
        elif pattern.startswith("**", at):
            found, at = found + ".*", at + 2
        elif pattern[at] == "[" and "]" in pattern[at + 2 :]:
            close = pattern.index("]", at + 2)
            inner = pattern[at + 1 : close].replace("\\", "\\\\")
            inner = "^" + inner[1:] if inner.startswith("!") else inner
            found, at = f"{found}[{inner}]", close + 1
        else:
            found += {"*": "[^/]*", "?": "[^/]"}.get(pattern[at], re.escape(pattern[at]))
            at += 1
    return found
