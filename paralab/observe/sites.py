"""Where in the user's code a call comes from: the frames that belong neither to a library nor to
us, innermost first.

A place is written once, with a number; the events that follow carry the number. Which code objects
are the user's is remembered, and a place is known by where its instructions are, so that finding it
again costs a microsecond or two.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from types import CodeType
from typing import Any

DEPTH = 4  # frames kept: enough to tell two callers of one helper function apart
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STANDARD = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")
)

Where = tuple[
    int, ...
]  # of each frame: the id of its code object (which costs less to look up than the object), the instruction

_own: dict[int, bool] = {}
_codes: dict[int, CodeType] = {}  # also keeps them: an id may not be used again
_numbers: dict[tuple[tuple[CodeType, int], ...], int] = {}
_of: dict[Where, int] = {}


def is_own(file: str) -> bool:
    """The user's own file: not torch, not another installed package, not the standard library, not
    us."""
    if file.startswith("<"):
        return False
    path = os.path.realpath(file)
    parts = ("site-packages", "dist-packages")
    return not (
        path.startswith((PACKAGE + os.sep, *STANDARD))
        or any(f"{os.sep}{part}{os.sep}" in path for part in parts)
    )


def where(outside: Any = None) -> Where:
    """The user's innermost frames; those of methods of `outside` are left out."""
    found: list[int] = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        own = _own.get(id(code))
        if own is None:
            _codes[id(code)] = code
            own = _own[id(code)] = is_own(code.co_filename)
        if own and (outside is None or frame.f_locals.get("self") is not outside):
            found += (id(code), frame.f_lasti)
            if len(found) == 2 * DEPTH:
                break
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def near(depth: int, through: int) -> Where | None:
    """The same for a call that comes as it came before, without a walk: the frame so deep is of the
    code `through`, and the user's frame calls it. Its two innermost frames; None: it comes
    otherwise."""
    if not depth:
        return None  # it never came; and a frame that holds itself would keep all that its callers hold
    try:
        frame = sys._getframe(depth)
    except ValueError:
        return None
    user = frame.f_back
    if id(frame.f_code) != through or user is None or not _own.get(id(user.f_code)):
        return None
    outer = user.f_back
    inner = (id(user.f_code), user.f_lasti)
    return inner if outer is None else (*inner, id(outer.f_code), outer.f_lasti)


def way_here() -> tuple[int, int]:
    """(depth, through) for `near`, when it is called from where this is called."""
    depth, frame = 0, sys._getframe(0)
    while (user := frame.f_back) is not None and not _own.get(id(user.f_code)):
        depth, frame = depth + 1, user
    return depth, id(frame.f_code)


def places(at: Where) -> list[list[Any]]:
    """[file, line, function] of each frame."""
    return [[os.path.abspath(code.co_filename), line, code.co_name] for code, line in _lines(at)]


def _lines(at: Where) -> list[tuple[CodeType, int]]:
    found = []
    for code, instruction in ((_codes[at[i]], at[i + 1]) for i in range(0, len(at), 2)):
        lines = (
            line
            for start, end, line in code.co_lines()
            if start <= instruction < end and line is not None
        )
        found.append((code, next(lines, code.co_firstlineno)))
    return found


def number_of(at: Where) -> tuple[int | None, dict[str, Any] | None]:
    """The number of a place, and, the first time, the event that says what it stands for: its
    lines, not its instructions."""
    if not at:
        return None, None
    if at in _of:
        return _of[at], None
    key = tuple(_lines(at))
    is_new = key not in _numbers
    number = _of[at] = _numbers.setdefault(key, len(_numbers))
    return number, {"event": "site", "id": number, "stack": places(at)} if is_new else None


def forget() -> None:
    """In a child that was forked: it writes its own places down."""
    _numbers.clear()
    _of.clear()
