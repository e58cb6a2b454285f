"""Where in the user's code a call comes from: the frames that belong neither to a library nor to us, innermost first.

A place is written once, with a number; the events that follow carry the number. Which code objects are the user's is remembered, so
that finding a place costs a few microseconds.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from types import CodeType
from typing import Any

DEPTH = 4  # frames kept: enough to tell two callers of one helper function apart
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STANDARD = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))

_own: dict[CodeType, bool] = {}
_numbers: dict[tuple[tuple[CodeType, int], ...], int] = {}


def is_own(file: str) -> bool:
    """The user's own file: not torch, not another installed package, not the standard library, not us."""
    if file.startswith("<"):
        return False
    path = os.path.realpath(file)
    parts = ("site-packages", "dist-packages")
    return not (path.startswith((PACKAGE + os.sep, *STANDARD)) or any(f"{os.sep}{part}{os.sep}" in path for part in parts))


def frames(depth: int = DEPTH, outside: Any = None) -> list[tuple[CodeType, int]]:
    """(code, line) of the user's innermost frames; those of methods of `outside` are left out."""
    found: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < depth:
        code = frame.f_code
        own = _own.get(code)
        if own is None:
            own = _own[code] = is_own(code.co_filename)
        if own and (outside is None or frame.f_locals.get("self") is not outside):
            found.append((code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def places(found: list[tuple[CodeType, int]]) -> list[list[Any]]:
    """[file, line, function] of each frame."""
    return [[os.path.abspath(code.co_filename), line, code.co_name] for code, line in found]


def number_of(found: list[tuple[CodeType, int]]) -> tuple[int | None, dict[str, Any] | None]:
    """The number of a place, and, the first time, the event that says what it stands for."""
    if not found:
        return None, None
    key = tuple(found)
    number = _numbers.get(key)
    if number is not None:
        return number, None
    number = _numbers[key] = len(_numbers)
    return number, {"event": "site", "id": number, "stack": places(found)}
