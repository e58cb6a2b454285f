"""Cures as edits of a script's lines. Only what stands on one line is changed; everything else is
left to the user's hands."""

from __future__ import annotations

import ast
from pathlib import Path

from paralab.doctor.finding import Edit
from paralab.doctor.script.pointing import file_of
from paralab.doctor.script.reading import Script


def swapped(script: Script, file: Path, node: ast.AST, text: str) -> tuple[Edit, ...]:
    """The node's code becomes `text`."""
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", -1)
    if first != last or not first:
        return ()
    line = script.lines(file)[first - 1].encode()
    new = (
        line[: getattr(node, "col_offset", 0)]
        + text.encode()
        + line[getattr(node, "end_col_offset", 0) or 0 :]
    )
    return (Edit(script.shown(file), first, first, (new.decode(),)),)


def with_keyword(script: Script, file: Path, node: ast.AST, text: str) -> tuple[Edit, ...]:
    """A call with one more keyword argument at its end."""
    if not isinstance(node, ast.Call) or not (node.args or node.keywords):
        return ()
    code = ast.get_source_segment("\n".join(script.lines(file)), node) or ""
    return swapped(script, file, node, f"{code[:-1].rstrip().rstrip(',')}, {text})")


def inserted(script: Script, file: Path, before: ast.stmt, *texts: str) -> tuple[Edit, ...]:
    """New statements before a statement, at its indent. Nothing where several statements share a
    line."""
    line = script.lines(file)[before.lineno - 1]
    indent = line[: before.col_offset]
    if indent.strip():
        return ()
    return (
        Edit(
            script.shown(file),
            before.lineno,
            before.lineno - 1,
            tuple(indent + text for text in texts),
        ),
    )


def statement_of(script: Script, file: Path, node: ast.AST) -> ast.stmt | None:
    """The smallest statement that a node stands in."""
    found = None
    for statement in script.nodes[file]:
        if isinstance(statement, ast.stmt) and any(part is node for part in ast.walk(statement)):
            found = statement  # walk goes from the outside in
    return found


def function_of(script: Script, file: Path, node: ast.AST) -> ast.AST | None:
    """The innermost function that a node stands in; the module where it stands in none."""
    found: ast.AST | None = None
    for function in script.nodes[file]:
        is_one = isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module)
        if is_one and any(part is node for part in ast.walk(function)):
            found = function
    return found


def out_of_branch(
    script: Script, file: Path, branch: ast.AST, inside: ast.AST | None
) -> tuple[Edit, ...]:
    """The first line under `if …:` moves before it; an `if` that has nothing left goes away."""
    if not isinstance(branch, ast.If) or branch.orelse or file_of(script, branch) != file:
        return ()
    body = branch.body[0]
    lines = script.lines(file)
    header = lines[branch.lineno - 1]
    indent = header[: branch.col_offset]
    if indent.strip() or not header.split("#")[0].rstrip().endswith(":"):
        return ()
    if not (body.lineno == body.end_lineno == branch.lineno + 1) or not any(
        part is inside for part in ast.walk(body)
    ):
        return ()
    moved = indent + lines[body.lineno - 1][body.col_offset :]
    left = (header,) if len(branch.body) > 1 else ()
    return (Edit(script.shown(file), branch.lineno, body.lineno, (moved, *left)),)
