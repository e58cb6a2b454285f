"""Gradient accumulation in a script: which backward passes one optimizer step adds up."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.static.project import Scope
from paralab.doctor.static.script import Script

Expression = tuple[ast.expr, Scope]
MOST_PARTS = 300


def parts(script: Script, node: ast.expr, scope: Scope) -> Iterator[Expression]:
    """An expression and everything it is computed from: names, and returns of project functions."""
    seen: set[ast.AST] = set()
    waiting = [(node, scope)]
    while waiting and len(seen) < MOST_PARTS:
        value, where = waiting.pop(0)
        for part in ast.walk(value):
            if part in seen or not isinstance(part, ast.expr):
                continue
            seen.add(part)
            yield part, where
            if isinstance(part, (ast.Name, ast.Attribute)):
                for definition in script.reaching(part, where):
                    if definition.how == "parameter":
                        waiting.extend(script.arguments_for(definition))
                    elif definition.how in ("assign", "augmented") and definition.value is not None:
                        waiting.append((definition.value, definition.scope))
            elif isinstance(part, ast.Call) and part in script.call_at:
                function = script.call_at[part].function
                if function is not None:
                    waiting.extend((one, function) for one in function.returns)


def modulo_in(script: Script, test: ast.expr, scope: Scope) -> tuple[ast.BinOp, Scope] | None:
    """The `i % n` that a test depends on."""
    for part, where in parts(script, test, scope):
        match part:
            case ast.BinOp(left, ast.Mod()) if not isinstance(left, ast.Constant):
                return part, where
    return None
