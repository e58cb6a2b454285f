"""The conditions, loops, and with-blocks that enclose a node in its function.

for x, y in loader:                 Loop
    with model.no_sync():           With
        loss = f(model(x), y)
    if rank == 0:                   If(taken=True)
        dist.barrier()
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.project import SCOPES, Module

EXITS = ("sys.exit", "exit", "quit", "os._exit")


@dataclass(frozen=True)
class If:
    """A condition for reaching a node. `exits` is how the other branch leaves: return, raise, …"""

    node: ast.AST
    test: ast.expr
    taken: bool
    exits: str = ""


@dataclass(frozen=True)
class Loop:
    node: ast.AST


@dataclass(frozen=True)
class With:
    node: ast.AST
    item: ast.expr


@dataclass(frozen=True)
class Except:
    node: ast.AST


Context = If | Loop | With | Except
Contexts = tuple[Context, ...]


def context_of(node: ast.AST, module: Module) -> Contexts:
    """Return the conditions, loops, and with-blocks that enclose a node, outermost first."""
    if node not in module.contexts:
        parent = module.parents.get(node)
        starts = isinstance(node, SCOPES) and not isinstance(node, ast.Lambda)
        is_outermost = starts or parent is None or isinstance(parent, SCOPES)
        outer = () if is_outermost or parent is None else context_of(parent, module)
        before = _left_before(node, parent, module)
        module.contexts[node] = (*outer, *_step(node, parent), *before)
    return module.contexts[node]


def _step(node: ast.AST, parent: ast.AST | None) -> Iterator[Context]:
    """Yield the conditions, loops, and with-blocks that one level of nesting adds."""
    match parent:
        case ast.If() | ast.IfExp() if node is not parent.test:
            body = parent.body if isinstance(parent.body, list) else [parent.body]
            yield If(parent, parent.test, any(one is node for one in body))
        case ast.BoolOp():
            for value in parent.values:
                if value is node:
                    break
                yield If(parent, value, isinstance(parent.op, ast.And))
        case ast.While() if any(one is node for one in parent.body):
            yield If(parent, parent.test, True)
            yield Loop(parent)
        case ast.For() | ast.AsyncFor() if any(one is node for one in parent.body):
            yield Loop(parent)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            if not isinstance(node, ast.comprehension):
                for generator in parent.generators:
                    yield Loop(generator)
                    yield from (If(parent, test, True) for test in generator.ifs)
        case ast.With() | ast.AsyncWith() if isinstance(node, ast.stmt):
            yield from (With(parent, item.context_expr) for item in parent.items)
        case ast.ExceptHandler():
            yield Except(parent)


def _left_before(node: ast.AST, parent: ast.AST | None, module: Module) -> Contexts:
    """Return the conditions of earlier `if` statements that leave the same block in one branch."""
    if not isinstance(node, ast.stmt) or parent is None:
        return ()
    if node not in module.left_before:
        for block in blocks(parent):
            before: Contexts = ()
            for statement in block:
                module.left_before[statement] = before
                if isinstance(statement, ast.If):
                    left, other = leaves(statement.body), leaves(statement.orelse)
                    if bool(left) != bool(other):
                        taken = not left
                        before = (*before, If(statement, statement.test, taken, left or other))
    return module.left_before.get(node, ())


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def leaves(block: list[ast.stmt]) -> str:
    """Return how a block always ends early (return, raise, break, continue, exit), or ""."""
    for statement in block:
        match statement:
            case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
                return type(statement).__name__.lower()
            case ast.Expr(ast.Call(function)) if dotted_key(function) in EXITS:
                return "exit"
            case ast.If(orelse=[_, *_]):
                left = leaves(statement.body)
                if left and leaves(statement.orelse):
                    return left
            case ast.With():
                left = leaves(statement.body)
                if left:
                    return left
    return ""


def catches(node: ast.AST, module: Module, name: str) -> bool:
    """Return whether the enclosing function catches this exception if the node raises it."""
    child, parent = node, module.parents.get(node)
    while parent is not None and not isinstance(parent, SCOPES):
        if isinstance(parent, ast.Try) and child in parent.body:
            caught = [one.type for one in parent.handlers]
            if None in caught or any(
                (dotted_key(part) or "") in (name, "Exception", "BaseException")
                for type in caught
                for part in ast.walk(type)  # type: ignore[arg-type]
            ):
                return True
        child, parent = parent, module.parents.get(parent)
    return False


def share_loop(one: Contexts, other: Contexts) -> bool:
    return any(isinstance(part, Loop) and part in other for part in one)


def are_exclusive(one: Contexts, other: Contexts) -> bool:
    """Return whether two nodes are in opposite branches of the same condition."""
    taken = {(part.node, part.test): part.taken for part in other if isinstance(part, If)}
    return any(
        isinstance(part, If) and taken.get((part.node, part.test), part.taken) != part.taken
        for part in one
    )
