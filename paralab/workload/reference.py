"""Workload names: a built-in name, `path/to/file.py:function`, or a pickle from a notebook."""

from __future__ import annotations

from pathlib import Path

from paralab.errors import UsageError
from paralab.workload.catalog import BUILT_IN, full_name

PICKLED = "pickle:"


def names_file(reference: str) -> bool:
    """Return whether this is `path/to/file.py:function` rather than a built-in name."""
    return ".py" in reference or "/" in reference


def check_reference(reference: str) -> str:
    """Return the reference with an absolute path, or reject it before importing torch."""
    if reference.startswith(PICKLED):
        return reference
    if not names_file(reference):
        name, _, function = reference.partition(":")
        if name not in BUILT_IN and Path(f"{name}.py").is_file():
            raise UsageError(
                f"There is no workload {reference!r}, but there is a file {name}.py.",
                fix=f"{name}.py:{function or 'function'}",
            )
        return full_name(reference)
    path, colon, attribute = split(reference)
    if not path.is_file():
        raise UsageError(f"There is no file {str(path)!r}.", fix="path/to/file.py:function")
    if not colon or not attribute:
        raise UsageError(
            f"{reference!r} names a file but not a function in it.",
            fix=f"{reference.rstrip(':')}:function",
        )
    return f"{path.resolve()}:{attribute}"


def user_folder(reference: str) -> Path:
    """Return the folder that contains the user's files. Tracebacks show only files in it."""
    is_file = names_file(reference) and not reference.startswith(PICKLED)
    return split(reference)[0].parent if is_file else Path()


def split(reference: str) -> tuple[Path, str, str]:
    path, colon, attribute = reference.rpartition(":")
    if not colon:
        path, attribute = reference, ""
    return Path(path).expanduser(), colon, attribute
