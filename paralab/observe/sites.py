"""Where in the user's code a call comes from: the frames that are neither in a library nor in
paralab, innermost first.

Each place is written once, with a number that later events refer to. Finding it again takes only a
microsecond or two: we remember which code objects are the user's, and identify a place by its
instructions.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from types import CodeType
from typing import Any

DEPTH = 4  # number of frames to keep: enough to tell two callers of one helper function apart
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STANDARD = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")
)

# For each frame: the id of its code object (faster to look up than the object) and the instruction.
Where = tuple[int, ...]

_own: dict[int, bool] = {}
_codes: dict[int, CodeType] = {}  # keep code objects alive, so that ids stay unique
_numbers: dict[tuple[tuple[CodeType, int, int | None], ...], int] = {}
_of: dict[Where, int] = {}


def is_own(file: str) -> bool:
    """Return whether a file is the user's, not an installed package's, Python's, or paralab's."""
    if file.startswith("<"):
        return False
    path = os.path.realpath(file)
    parts = ("site-packages", "dist-packages")
    return not (
        path.startswith((PACKAGE + os.sep, *STANDARD))
        or any(f"{os.sep}{part}{os.sep}" in path for part in parts)
    )


def where(outside: Any = None) -> Where:
    """Return the user's innermost frames, except methods of `outside`."""
    frames: list[int] = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        own = _own.get(id(code))
        if own is None:
            _codes[id(code)] = code
            own = _own[id(code)] = is_own(code.co_filename)
        if own and (outside is None or frame.f_locals.get("self") is not outside):
            frames += (id(code), frame.f_lasti)
            if len(frames) == 2 * DEPTH:
                break
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(frames)


def places(at: Where) -> list[list[Any]]:
    """Return the file, line, function, and column of each frame."""
    return [
        [os.path.abspath(code.co_filename), line, code.co_name, column]
        for code, line, column in _positions(at)
    ]


def _positions(at: Where) -> Iterator[tuple[CodeType, int, int | None]]:
    for code, instruction in ((_codes[at[i]], at[i + 1]) for i in range(0, len(at), 2)):
        own = islice(code.co_positions(), instruction // 2, None)
        line, _, column, _ = next(own, (None, None, None, None))
        yield code, line or code.co_firstlineno, column


def number_of(at: Where) -> tuple[int | None, dict[str, Any] | None]:
    """Return the number of a place and, the first time, the event that describes it."""
    if not at:
        return None, None
    if at in _of:
        return _of[at], None
    key = tuple(_positions(at))
    is_new = key not in _numbers
    number = _of[at] = _numbers.setdefault(key, len(_numbers))
    return number, {"event": "site", "id": number, "stack": places(at)} if is_new else None


def forget() -> None:
    """Start over in a forked child, which writes its own places."""
    _numbers.clear()
    _of.clear()
