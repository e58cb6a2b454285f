"""Settings from the command line and [tool.paralab.doctor]: which failures to report, and in
which files."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paralab.doctor.catalog import ENTRIES, GROUPS, entry
from paralab.doctor.globs import compile_patterns, is_excluded
from paralab.errors import UsageError, unknown

# Off unless selected. H17 made up half of all warnings on public code: most scripts exit without
# destroy_process_group(), which is rarely harmful.
DEFAULT_OFF = frozenset({"H17"})
TABLE = "[tool.paralab.doctor]"
KEYS = ("select", "ignore", "exclude", "per-file-ignores", "baseline")
EVERYTHING = "ALL"


@dataclass(frozen=True)
class Settings:
    """`hidden` holds failures that are off by default and only counted. `root` is the folder that
    patterns are relative to: the folder of pyproject.toml, or the current one."""

    select: frozenset[str] = frozenset(ENTRIES) - DEFAULT_OFF
    hidden: frozenset[str] = DEFAULT_OFF
    exclude: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, frozenset[str]] = field(default_factory=dict)
    baseline: Path | None = None
    root: Path = field(default_factory=Path.cwd)

    def excludes(self, file: Path) -> bool:
        return is_excluded(self.relative(file), compile_patterns(self.exclude))

    def pattern_for(self, id: str, file: str | Path) -> str | None:
        """Return the pattern in per-file-ignores that turns a failure off in a file."""
        path = self.relative(file) if self.per_file_ignores else ""
        return next(
            (
                pattern
                for pattern, ids in self.per_file_ignores.items()
                if id in ids and is_excluded(path, compile_patterns([pattern]))
            ),
            None,
        )

    def relative(self, file: str | Path) -> str:
        """Return the path that patterns and baselines use: relative to the root, with slashes."""
        return Path(os.path.relpath(os.path.realpath(file), self.root.resolve())).as_posix()


def read_settings(
    paths: Sequence[Path],
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    exclude: Sequence[str] = (),
    baseline: Path | None = None,
) -> Settings:
    """Combine the nearest pyproject.toml above the checked files with the command line.

    --select replaces the file's `select` and `ignore`. --ignore and --exclude add to the file's
    `ignore` and `exclude`.
    """
    file = _find_file(paths)
    table = _read_table(file) if file else {}
    root = file.parent if file else Path.cwd()
    chosen = select or _strings(table, "select", file)
    selected = parse_ids(chosen) if chosen else frozenset(ENTRIES) - DEFAULT_OFF
    ignored = parse_ids(ignore)
    if not select:
        ignored |= parse_ids(_strings(table, "ignore", file))
    stored = table.get("baseline")
    if stored is not None and not isinstance(stored, str):
        raise _wrong(file, "baseline", "the name of a file")
    return Settings(
        selected - ignored,
        frozenset() if chosen else DEFAULT_OFF - ignored,
        (*_strings(table, "exclude", file), *exclude),
        _per_file(table, file),
        baseline or (root / stored if stored else None),
        root,
    )


def parse_ids(words: Sequence[str]) -> frozenset[str]:
    """Parse ids: `H03`, `h3`, `H` for a group, or `ALL`. Commas may separate them."""
    found: set[str] = set()
    for word in (part.strip() for each in words for part in each.split(",")):
        if word.upper() == EVERYTHING:
            found.update(ENTRIES)
        elif word.upper() in GROUPS:
            found.update(id for id in ENTRIES if id[0] == word.upper())
        elif word:
            found.add(entry(word).id)
    return frozenset(found)


def _find_file(paths: Sequence[Path]) -> Path | None:
    """Return the nearest pyproject.toml with our table, above all checked files."""
    given = [Path(os.path.realpath(path)) for path in paths if str(path) != "-"]
    folders = [path if path.is_dir() else path.parent for path in given] or [Path.cwd()]
    start = Path(os.path.commonpath(folders))
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file() and "paralab" in file.read_text("utf-8", "replace") and _read_table(file):
            return file
    return None


def _read_table(file: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(file.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not valid TOML: {error}.", fix="correct the file") from error
    table = content.get("tool", {}).get("paralab", {}).get("doctor", {})
    if not isinstance(table, dict):
        raise UsageError(f"{file}: tool.paralab.doctor is not a table.", fix=TABLE)
    for key in table:
        if key not in KEYS:
            raise unknown(f"setting in {TABLE} of {file}", key, KEYS)
    return table


def _strings(table: Mapping[str, Any], key: str, file: Path | None) -> list[str]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _wrong(file, key, "a list of strings")
    return value


def _per_file(table: Mapping[str, Any], file: Path | None) -> dict[str, frozenset[str]]:
    value = table.get("per-file-ignores", {})
    if not isinstance(value, dict):
        raise _wrong(file, "per-file-ignores", "a table")
    return {pattern: parse_ids(_strings(value, pattern, file)) for pattern in value}


def _wrong(file: Path | None, key: str, wanted: str) -> UsageError:
    example = {
        "baseline": 'baseline = "doctor-baseline.json"',
        "per-file-ignores": 'per-file-ignores = { "tests/**" = ["H03"] }',
    }
    return UsageError(
        f"{file}: {key!r} must be {wanted}.", fix=example.get(key, f'{key} = ["H03", "G"]')
    )
