"""The names that a statement binds, and what it binds them to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from paralab.doctor.static.imports import absolute, folders_above

# name, how, value, index, imported: as in project.Definition
Binding = tuple[str, str, ast.expr | None, int | None, str]


def bindings(node: ast.AST, file: Path) -> Iterator[Binding]:
    """Yield the names that a statement binds."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node.name, "function", None, None, ""
        case ast.ClassDef():
            yield node.name, "class", None, None, ""
        case ast.Import():
            for alias in node.names:
                first = alias.name.split(".")[0]
                name = alias.name if alias.asname else first
                yield alias.asname or first, "import", None, None, name
        case ast.ImportFrom():
            base = absolute(node, file, folders_above(file.parent))
            for alias in node.names:
                yield alias.asname or alias.name, "import", None, None, f"{base}.{alias.name}"
        case ast.Assign():
            for target in node.targets:
                yield from _bind(target, node.value)
        case ast.AnnAssign(target, _, ast.expr() as value) | ast.NamedExpr(target, value):
            yield from _bind(target, value)
        case ast.AugAssign():
            value = ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
            key = dotted_key(node.target)
            if key:
                yield key, "augmented", value, None, ""
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            yield from _bind_items(node.target, node.iter)
        case ast.With() | ast.AsyncWith():
            for item in node.items:
                if item.optional_vars is not None:
                    yield from _bind(item.optional_vars, item.context_expr)


def _bind(target: ast.expr, value: ast.expr) -> Iterator[Binding]:
    """Yield the names that an assignment binds: `a = v`, `self.a = v`, `a, b = v, w`."""
    key = dotted_key(target)
    if key:
        yield key, "assign", value, None, ""
    elif isinstance(target, (ast.Tuple, ast.List)):
        values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        for index, part in enumerate(target.elts):
            if len(values) == len(target.elts):
                yield from _bind(part, values[index])
            else:
                yield from _bind_items(part, value, index)


def _bind_items(target: ast.expr, value: ast.expr, index: int | None = None) -> Iterator[Binding]:
    target = target.value if isinstance(target, ast.Starred) else target
    key = dotted_key(target)
    if key:
        yield key, "item", value, index, ""
    elif isinstance(target, (ast.Tuple, ast.List)):
        for number, part in enumerate(target.elts):
            yield from _bind_items(part, value, number)


def dotted_key(node: ast.AST) -> str | None:
    """Return a dotted name such as `a`, `self.a`, or `args.rank`; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted_key(node.value)
        return f"{base}.{node.attr}" if base else None
    return None
