"""A look into the user's file, where it lies on this machine: was a call made under a rank
condition?

That decides between two mistakes that look alike in a log, a rank that calls a collective alone and
a rank that has left: in the first the one that waits is to blame, in the second the one that is
gone. Without the file nobody is named."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

from paralab.doctor.logs.traceback import Frame, Traceback

RANK = re.compile(
    r"(?:^|_)rank$|^rank|is_(?:main|master|chief|global_zero|rank)|main_process|master_process|get_rank",
    re.IGNORECASE,
)
LARGEST = 2 << 20  # bytes


def called_alone(trace: Traceback) -> bool | None:
    """True: one of the user's frames lies under a rank condition. False: none does. None: the file
    is not here, or has changed."""
    known = [_under_condition(frame) for frame in trace.frames if frame.own]
    if any(known):
        return True
    return None if not known or None in known else False


def _under_condition(frame: Frame) -> bool | None:
    read = _parsed(frame.file)
    if read is None:
        return None
    lines, tree = read
    if frame.line > len(lines) or (frame.code and frame.code != lines[frame.line - 1].strip()):
        return None  # another version of the file
    return any(_guards(node, frame.line) for node in ast.walk(tree))


def _guards(node: ast.AST, line: int) -> bool:
    """An `if rank == 0:` around the line, or an `if rank != 0: return` before it in the same
    block."""
    if (
        isinstance(node, ast.If)
        and _asks_for_rank(node.test)
        and node.lineno < line <= (node.end_lineno or 0)
    ):
        return True
    for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
        if not isinstance(block, list):
            continue
        left = False
        for statement in block:
            if left and statement.lineno <= line <= (statement.end_lineno or 0):
                return True
            if (
                isinstance(statement, ast.If)
                and _asks_for_rank(statement.test)
                and not statement.orelse
            ):
                left = left or isinstance(statement.body[-1], ast.Return | ast.Continue | ast.Break)
    return False


def _asks_for_rank(test: ast.expr) -> bool:
    names = [node.id for node in ast.walk(test) if isinstance(node, ast.Name)]
    names += [node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)]
    return any(RANK.search(name) for name in names)


@lru_cache(maxsize=64)
def _parsed(file: str) -> tuple[list[str], ast.Module] | None:
    try:
        path = Path(file)
        if not path.is_absolute() or path.stat().st_size > LARGEST:
            return None
        text = path.read_text(errors="replace")
        return text.splitlines(), ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
