"""The source around a line that a watched rank reported: its enclosing conditions, and the
statements that leave a loop or a function early. Checks use this to name a line, never to find a
failure."""

import ast
import itertools
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from paralab.doctor.place import Place, Site
from paralab.doctor.static.names import meaning

DEPTH = 4  # number of frames kept for each call
FLAGS = ("master", "chief", "leader")  # names of flags that only one rank sets
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


@dataclass(frozen=True)
class Condition:
    """An `if` that encloses a call, and the branch that contains the call."""

    file: str
    line: int
    test: str
    side: str  # the branch: body or orelse

    @property
    def is_about_the_rank(self) -> bool:
        words = [word.removeprefix("get_") for word in re.findall(r"\w+", self.test)]
        return any(meaning(word) in ("rank", "main") or word in FLAGS for word in words)


@dataclass(frozen=True)
class Leaving:
    """A statement that leaves a loop or function early, and its enclosing condition."""

    place: Place
    kind: str  # break, return, exit
    condition: Condition | None


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, ValueError, SyntaxError):
        return None


def conditions(place: Place) -> list[Condition]:
    """Return the conditions that enclose a call within its function, outermost first."""
    nodes = around(place)
    return [
        Condition(place.file, node.lineno, ast.unparse(node.test), side)
        for node, inner in itertools.pairwise(nodes)
        if isinstance(node, (ast.If, ast.IfExp))
        for side in ("body", "orelse")
        if inner is (branch := getattr(node, side))
        or (isinstance(branch, list) and inner in branch)
    ]


def site_conditions(site: Site) -> list[Condition]:
    """Return the enclosing conditions of every frame of a call. A caller's conditions also apply to
    the functions it calls."""
    return [condition for place in site.stack for condition in conditions(place)]


def opposite(one: Site, other: Site) -> bool:
    mine = {(c.file, c.line): c.side for c in site_conditions(one)}
    return any(mine.get((c.file, c.line), c.side) != c.side for c in site_conditions(other))


def statement_at(place: Place) -> str:
    inner = next((node for node in reversed(around(place)) if isinstance(node, ast.stmt)), None)
    if isinstance(inner, (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)):
        return ast.unparse(inner)
    return place.code.partition("  #")[0]


def call_at(place: Place) -> str:
    """Return the call that begins here, or its statement if the column is unknown."""
    calls = (node for node in around(place) if isinstance(node, ast.Call))
    here = (c for c in calls if (c.lineno, c.col_offset) == (place.line, place.column))
    return next(map(ast.unparse, here), None) or statement_at(place)


def ways_out_of_loops(site: Site, loop_line: int | None, only_around: bool) -> list[Leaving]:
    """Return statements that leave a loop around a call, innermost loop first. `loop_line` is the
    line of the loop over the data. With `only_around`, ignore that loop and those inside it."""
    ways: list[Leaving] = []
    beyond = not only_around or loop_line is None
    for place in site.stack:
        for loop in reversed(_loopsaround(place)):
            if beyond:
                ways += [leaving for leaving in _leavings(loop, place) if leaving not in ways]
            if loop.lineno == loop_line and not only_around and ways:
                return ways  # a statement that leaves an outer loop does not count
            beyond = beyond or loop.lineno == loop_line
    return ways


@lru_cache(maxsize=1024)
def is_outside(site: Site, loop: Site) -> bool:
    """Return whether the call is outside the loop. Only the innermost frames are known. The call is
    outside if it comes from a caller of the loop's function without passing through that
    function."""
    functions = {(place.file, place.function) for place in site.stack}
    if (loop.file, loop.place.function) not in functions:
        callers = {(place.file, place.function) for place in loop.stack[1:]}
        return bool(callers & functions) or len(site.stack) < DEPTH
    places = [place for place in site.stack if place.file == loop.file]
    return not any(node.lineno == loop.line for each in places for node in _loopsaround(each))


def returns_before(place: Place, after: int) -> list[Leaving]:
    """Return conditional returns and exits in the same function, between `after` and `place`."""
    return [
        leaving
        for function in around(place)[:1]
        for leaving in _leavings(function, place)
        if leaving.kind != "break" and after <= leaving.place.line < place.line
    ]


def around(place: Place) -> list[ast.AST]:
    """Return the nodes that enclose a line, from its function inward. If the file is unreadable,
    return an empty list."""
    return _around(place.file, place.line, place.column)


@lru_cache(maxsize=4096)
def _around(file: str, line: int, column: int | None) -> list[ast.AST]:
    chain: list[ast.AST] = []
    node: ast.AST | None = _tree(file)
    while node is not None:
        if isinstance(node, Function):
            chain = []
        chain.append(node)
        inner = (child for child in ast.iter_child_nodes(node) if _covers(child, line, column))
        node = next(inner, None)
    return chain


def _leavings(owner: ast.AST, place: Place) -> list[Leaving]:
    leavings: list[Leaving] = []

    def visit(node: ast.AST, condition: Condition | None, in_loop: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
                continue
            kind = _kind(child, owner, in_loop)
            if kind and condition:
                line = getattr(child, "lineno", place.line)
                leavings.append(Leaving(Place(place.file, line, place.function), kind, condition))
            inner = condition
            if isinstance(child, ast.If):
                inner = Condition(place.file, child.lineno, ast.unparse(child.test), "body")
            visit(child, inner, in_loop or isinstance(child, (ast.For, ast.While)))

    visit(owner, None, False)
    return leavings


def _kind(node: ast.AST, owner: ast.AST, in_loop: bool) -> str | None:
    if isinstance(node, ast.Break) and isinstance(owner, (ast.For, ast.While)) and not in_loop:
        return "break"
    if isinstance(node, ast.Return):
        return "return"
    match node:
        case ast.Expr(value=ast.Call(func=call)):
            return "exit" if ast.unparse(call).endswith(("exit", "quit")) else None
        case ast.Raise(exc=ast.expr() as raised):
            return "exit" if ast.unparse(raised).startswith("SystemExit") else None
    return None


def _loopsaround(place: Place) -> list[ast.For | ast.While]:
    return [node for node in around(place) if isinstance(node, (ast.For, ast.While))]


def _covers(node: ast.AST, line: int, column: int | None) -> bool:
    if isinstance(node, (ast.expr, ast.keyword)) and column is not None:
        start, at = (node.lineno, node.col_offset), (line, column)
        return start <= at < (node.end_lineno or 0, node.end_col_offset or 0)
    if not isinstance(node, (ast.stmt, ast.ExceptHandler)):
        return False
    return node.lineno <= line <= (node.end_lineno or node.lineno)
