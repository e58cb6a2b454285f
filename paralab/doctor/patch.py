"""Fixes as text: a finding's edits become a unified diff and, with --fix, a new file.

Edits replace whole lines and keep everything else byte for byte. A file that has changed since the
check is left alone.
"""

import ast
import difflib
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paralab.doctor.registry import Edit, Finding
from paralab.doctor.sources import Sources, encoding_of, lines_of, read
from paralab.errors import UsageError


class DoesNotFit(Exception):
    """The edits cannot be applied to this text; the message gives the reason."""


@dataclass(frozen=True)
class Unfixed:
    """A finding that --fix did not fix, and why."""

    finding: Finding
    reason: str


@dataclass(frozen=True)
class Fixes:
    """The result of --fix: a diff per changed file, the fixed ids, and the findings that remain."""

    changed: dict[str, str]
    ids: tuple[str, ...]
    left: tuple[Unfixed, ...]

    def to_json(self) -> dict[str, object]:
        left = [
            {name: getattr(each.finding, name) for name in ("id", "file", "line")}
            | {"reason": each.reason}
            for each in self.left
        ]
        return {"files": self.changed, "ids": list(self.ids), "left": left}


def overlap(one: Edit, other: Edit) -> bool:
    """Return whether two edits touch the same lines (3–5, 4–4) or insert before the same line."""
    if one.file != other.file:
        return False
    # Line n spans n to n+1, and an insertion is the point before its line.
    (a, b), (c, d) = ((edit.first, edit.last + 1) for edit in (one, other))
    if a == b and c == d:
        return a == c
    return max(a, c) < min(b, d) or (a == b and c < a < d) or (c == d and a < c < b)


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return the text after the edits. Keep line endings, even if the last one is missing."""
    lines = lines_of(text)
    end = next(
        (line[len(line.rstrip("\r\n")) :] for line in lines if line.endswith(("\n", "\r"))), "\n"
    )
    done: list[Edit] = []
    for edit in sorted(set(edits), key=lambda e: (e.first, e.last), reverse=True):
        if not (1 <= edit.first <= len(lines) + 1 and edit.first - 1 <= edit.last <= len(lines)):
            raise DoesNotFit(f"lines {edit.first}–{edit.last} of the {len(lines)} in {edit.file}")
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
    try:
        return Path(file).resolve().relative_to(Path.cwd().resolve()).as_posix()
    except (ValueError, OSError):
        return file


def _diff(file: str, before: str, after: str) -> str:
    shown = shown_path(file)
    names = (shown, shown) if Path(shown).is_absolute() else (f"a/{shown}", f"b/{shown}")
    lines = []
    for line in difflib.unified_diff(lines_of(before), lines_of(after), *names):
        lines.append(line.rstrip("\r\n"))
        if not line.endswith(("\n", "\r")):
            lines.append("\\ No newline at end of file")
    return "\n".join(lines) + "\n" if lines else ""


def diff(edits: Sequence[Edit], sources: Sources) -> str | None:
    """Return a unified diff over all files; None if nothing changes or an edit does not fit."""
    parts = []
    for file in dict.fromkeys(edit.file for edit in edits):
        before = sources.text(file)
        if before is None:
            return None
        try:
            after = apply_edits(before, [edit for edit in edits if edit.file == file])
        except DoesNotFit:
            return None
        parts.append(_diff(file, before, after))
    return "".join(parts) or None


def fix(findings: Sequence[Finding], sources: Sources) -> Fixes:
    """Apply the fixes for errors and warnings, most certain first."""
    chosen: list[Edit] = []
    texts: dict[str, str] = {}
    ids, left = [], []
    for finding in findings:
        reason = _reason_to_leave(finding, chosen, sources)
        if reason is None:
            more = [edit for edit in finding.edits if edit not in chosen]
            try:
                texts |= _apply([*chosen, *more], {edit.file for edit in finding.edits}, sources)
            except (DoesNotFit, SyntaxError) as error:
                reason = f"its patch cannot be applied ({error})"
            else:
                chosen += more
                ids.append(finding.id)
        if reason is not None:
            left.append(Unfixed(finding, reason))

    changed = {}
    for file, after in texts.items():
        changed[file] = _diff(file, sources.text(file) or "", after)
        _replace(Path(file).resolve(), after)
    if changed:
        sources.forget()
    return Fixes(changed, tuple(ids), tuple(left))


def _reason_to_leave(finding: Finding, chosen: list[Edit], sources: Sources) -> str | None:
    if finding.severity == "suspect":
        return "only a suspect"
    if not finding.edits:
        return "must be fixed by hand"
    for file in dict.fromkeys(edit.file for edit in finding.edits):
        text, path = sources.text(file), Path(file)
        if text is None:
            return f"{file} cannot be read"
        if read(path) != text:
            return f"{file} has changed since it was checked"
        if not (os.access(path, os.W_OK) and os.access(path.resolve().parent, os.W_OK)):
            return f"{file} is read-only"
    if any(overlap(edit, other) for edit in finding.edits for other in chosen if edit != other):
        return "another fix changes the same lines; run --fix again"
    return None


def _apply(edits: Sequence[Edit], files: set[str], sources: Sources) -> dict[str, str]:
    """Return the new text of each file. Raise if it would not be valid Python."""
    texts = {}
    for file in sorted(files):
        own = [edit for edit in edits if edit.file == file]
        texts[file] = apply_edits(sources.text(file) or "", own)
        if file.endswith(".py"):
            ast.parse(texts[file])
    return texts


def _replace(path: Path, text: str) -> None:
    """Write a temporary file and rename it, so that the file is never half written."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be replaced: {error.strerror}.", fix="apply the patch by hand"
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
