"""Cures as text: a finding's edits become a unified diff, and on request the file itself. A file
that is not exactly what the edits were made for stays as it is."""

from __future__ import annotations

import ast
import difflib
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paralab.doctor.finding import Edit, Finding
from paralab.doctor.sources import Sources, encoding_of, lines_of, read
from paralab.errors import UsageError


class DoesNotFit(Exception):
    """The edits cannot be made to this text; the message says why."""


@dataclass(frozen=True)
class Fixes:
    """What --fix did: a diff per changed file, and why other fixes were left out."""

    changed: dict[str, str]
    ids: tuple[str, ...]
    left: tuple[str, ...]


def _span(edit: Edit) -> tuple[float, float]:
    """Where an edit works, on an axis on which line n reaches from n to n+1. An insertion is the
    point before its line."""
    return (edit.first, edit.last + 1)


def overlap(one: Edit, other: Edit) -> bool:
    """Two edits of one file that cannot both be made, or not in a known order: 3–5 and 4–4, or two
    insertions before line 3."""
    if one.file != other.file:
        return False
    (a, b), (c, d) = _span(one), _span(other)
    if a == b and c == d:
        return a == c
    return max(a, c) < min(b, d) or (a == b and c < a < d) or (c == d and a < c < b)


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text after the edits. Line ends are kept as the file has them, also a last line without
    one."""
    lines = lines_of(text)
    end = next(
        (line[len(line.rstrip("\r\n")) :] for line in lines if line.endswith(("\n", "\r"))), "\n"
    )
    done: list[Edit] = []
    for edit in sorted(set(edits), key=lambda e: (e.first, e.last), reverse=True):
        if not (1 <= edit.first <= len(lines) + 1 and edit.first - 1 <= edit.last <= len(lines)):
            raise DoesNotFit(
                f"lines {edit.first}–{edit.last} of {edit.file}, which has {len(lines)}"
            )
        if any(overlap(edit, other) for other in done):
            raise DoesNotFit(f"two edits at line {edit.first} of {edit.file}")
        unended = edit.first > len(lines) and lines and not lines[-1].endswith(("\n", "\r"))
        if unended:
            lines[-1] += end
        whole = edit.last < len(lines) or unended or not lines or lines[-1].endswith(("\n", "\r"))
        new = [line.rstrip("\r\n") + end for line in edit.lines]
        if new and not whole:
            new[-1] = new[-1].rstrip("\r\n")
        lines[edit.first - 1 : edit.last] = new
        done.append(edit)
    return "".join(lines)


def shown_path(file: str) -> str:
    """Relative to here where that is possible: what a diff, a terminal and a code host want."""
    try:
        return Path(file).resolve().relative_to(Path.cwd().resolve()).as_posix()
    except (ValueError, OSError):
        return file


def _diff(file: str, before: str, after: str) -> str:
    shown = shown_path(file)
    names = (shown, shown) if Path(shown).is_absolute() else (f"a/{shown}", f"b/{shown}")
    lines = []
    for line in difflib.unified_diff(
        lines_of(before), lines_of(after), fromfile=names[0], tofile=names[1]
    ):
        lines.append(line.rstrip("\r\n"))
        if not line.endswith(("\n", "\r")):
            lines.append("\\ No newline at end of file")
    return "\n".join(lines) + "\n" if lines else ""


def diff(edits: Sequence[Edit], sources: Sources) -> str | None:
    """A unified diff over all files; None if there is nothing to change, or the edits do not fit
    the files."""
    parts = []
    for file in dict.fromkeys(edit.file for edit in edits):
        before = sources.text(file)
        if before is None:
            return None
        try:
            parts.append(
                _diff(file, before, edited(before, [edit for edit in edits if edit.file == file]))
            )
        except DoesNotFit:
            return None
    return "".join(parts) or None


def fix(findings: Sequence[Finding], sources: Sources) -> Fixes:
    """Make the fixes of errors and warnings, the most certain first. One that touches lines of
    another waits for the next time."""
    chosen: list[Edit] = []
    ids, left = [], []
    for finding in findings:
        named = f"{finding.id} at {finding.file}:{finding.line}"
        if not finding.edits:
            continue
        if finding.severity == "suspect":
            left.append(f"{named}: only a suspicion; its patch is shown and not applied.")
        elif any(
            overlap(edit, other) for edit in finding.edits for other in chosen if edit != other
        ):
            left.append(f"{named}: its lines are changed by another fix already; run it once more.")
        else:
            chosen += [edit for edit in finding.edits if edit not in chosen]
            ids.append(finding.id)
    new = {
        file: _new_text(file, [edit for edit in chosen if edit.file == file], sources)
        for file in {e.file: 0 for e in chosen}
    }
    changed = {}
    for file in new:  # all of them, before the first is written
        _check(Path(file), expected=sources.text(file) or "")
    for file, after in new.items():
        changed[file] = _diff(file, sources.text(file) or "", after)
        _replace(Path(file).resolve(), after)
    if changed:
        sources.forget()
    return Fixes(changed, tuple(ids), tuple(left))


def _new_text(file: str, edits: list[Edit], sources: Sources) -> str:
    before = sources.text(file)
    if before is None:
        raise UsageError(
            f"{file} cannot be read, so it cannot be fixed.", fix="a script that is here"
        )
    try:
        after = edited(before, edits)
        if file.endswith(".py"):
            ast.parse(after)
    except (DoesNotFit, SyntaxError) as error:
        raise UsageError(
            f"{file} was left as it is: the fix does not fit ({error}).",
            fix="apply the shown patch by hand",
        ) from error
    return after


def _check(path: Path, expected: str) -> None:
    if read(path) != expected:
        raise UsageError(
            f"{path} has changed since it was read; it was left as it is.", fix="run it again"
        )
    if not os.access(path, os.W_OK):
        raise UsageError(
            f"{path} is read-only; it was left as it is.",
            fix="make it writable, or apply the shown patch by hand",
        )


def _replace(path: Path, text: str) -> None:
    """The new text under the old name in one move: whatever happens, one of the two is there."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be replaced: {error.strerror}.", fix="apply the shown patch by hand"
        ) from error
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(text.encode(encoding_of(path)))
            stream.flush()
            os.fsync(stream.fileno())
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
