"""Resolve a script's imports to files, from the script's folder and from its project root. The
working directory does not affect the result."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

LIBRARIES = frozenset(
    "torch torchvision accelerate transformers lightning pytorch_lightning deepspeed".split()
)
ROOT_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")


def search_path(script: Path) -> tuple[Path, ...]:
    """Return the folders for local imports: the script's own and those above it, up to the root."""
    return folders_above(script.resolve().parent)


@cache
def folders_above(here: Path) -> tuple[Path, ...]:
    ways = [here, *here.parents[:6]]
    root = next((at for at in ways if any((at / mark).exists() for mark in ROOT_MARKS)), None)
    if root is None:  # no project root: use the folder above the outermost package
        root = next((at for at in ways if not (at / "__init__.py").exists()), here)
    folders = ways[: ways.index(root) + 1]
    return (*folders, *(folder / "src" for folder in folders if (folder / "src").is_dir()))


@cache
def find_module(name: str, folders: tuple[Path, ...]) -> Path | None:
    """Return the file of a dotted module name."""
    first = name.partition(".")[0]
    for folder in folders:
        path = folder / name.replace(".", "/")
        for file in (path.with_name(path.name + ".py"), path / "__init__.py"):
            if first in _entries(folder) and file.is_file():
                return file
    return None


@cache
def _entries(folder: Path) -> set[str]:
    """Return the modules and packages in a folder."""
    try:
        return {entry.name.removesuffix(".py") for entry in os.scandir(folder)}
    except OSError:
        return set()


def imported_modules(
    node: ast.Import | ast.ImportFrom, file: Path, folders: tuple[Path, ...]
) -> Iterator[str]:
    """Yield the dotted names that may be modules: `from a import b` may mean a or a.b. Skip
    libraries that the checks know by name, even if the project contains their source."""
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names if one.name.partition(".")[0] not in LIBRARIES)
    elif node.level or (node.module or "").partition(".")[0] not in LIBRARIES:
        base = absolute(node, file, folders)
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def absolute(node: ast.ImportFrom, file: Path, folders: tuple[Path, ...]) -> str:
    """Return a from-import's dotted module name. Relative imports start at the file's folder."""
    if not node.level:
        return node.module or ""
    here = file.parents[min(node.level, len(file.parents)) - 1]
    for folder in folders:
        if here == folder or folder in here.parents:
            parts = [*here.relative_to(folder).parts, *(node.module or "").split(".")]
            return ".".join(part for part in parts if part)
    return node.module or ""
