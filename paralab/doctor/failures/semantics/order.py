"""Find which of two nodes runs first, by following the calls between functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.static.facts import Call, Facts, Loop
from paralab.doctor.static.project import Scope, position

Way = tuple[tuple[Scope, ast.AST], ...]
MOST_WAYS = 12


def ways(script: Facts, node: ast.AST, scope: Scope, depth: int = 5) -> Iterator[Way]:
    """Yield each chain of calls to a node, innermost first: the node, the call of its function, the
    call of that caller's function, and so on."""
    here = (scope, node)
    callers = script.callers(scope) if scope.is_function and depth else []
    for call in callers[:MOST_WAYS]:
        yield from ((here, *way) for way in ways(script, call.node, call.scope, depth - 1))
    if not callers:
        yield (here,)


def runs_after(
    script: Facts, later: tuple[ast.AST, Scope], earlier: tuple[ast.AST, Scope]
) -> set[str]:
    """Return which orders are possible: `after`, `before`, or `loop` if the nodes alternate. Only
    chains of calls that share a function count."""
    found = set()
    for one in ways(script, *later):
        for other in ways(script, *earlier):
            found.add(_compare(script, one, other))
    return found - {""}


def runs_later(script: Facts, calls: list[Call], place: tuple[ast.AST, Scope]) -> bool:
    """Return whether any of the calls may run after a place."""
    return any(runs_after(script, (one.node, one.scope), place) - {"before"} for one in calls)


def _compare(script: Facts, one: Way, other: Way) -> str:
    places = dict(reversed(other))
    for scope, node in one:
        if scope in places and places[scope] is not node:
            around = script.context(places[scope], scope.module)
            loops = [part for part in script.context(node, scope.module) if isinstance(part, Loop)]
            if any(loop in around for loop in loops):
                return "loop"
            return "after" if position(node) > position(places[scope]) else "before"
    return ""
