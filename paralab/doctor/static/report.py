"""Findings about a script: the location, the code as evidence, and short names for code."""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass

from paralab.doctor.registry import Edit, Finding, Severity, entries
from paralab.doctor.static.facts import Call
from paralab.doctor.static.project import Module, Scope
from paralab.doctor.static.script import Script
from paralab.doctor.static.ways import has_decided_tests, has_ranks, is_excluded, is_run


@dataclass(frozen=True)
class Place:
    node: ast.AST
    module: Module

    @property
    def line(self) -> int:
        return int(getattr(self.node, "lineno", 1))


At = Place | Call
TESTS = ("test_", "_test_")
ALONE = "ADGP"  # failures in these groups do not need multiple ranks


def at(node: ast.AST, scope: Scope) -> Place:
    return Place(node, scope.module)


def found(
    script: Script,
    id: str,
    severity: Severity,
    where: At,
    why: str,
    fix: str = "",
    *,
    doubt: str = "",
    also: tuple[At, ...] = (),
    edits: tuple[Edit, ...] = (),
) -> Finding:
    """Return a finding at a call or node. `fix` replaces the entry's fix. `doubt` ("if …") is what
    would make the finding certain, and turns it into a suspect. `also` adds other lines to the
    evidence."""
    if doubt:
        severity, why = "suspect", f"{why} This is certain {doubt}."
    evidence = tuple(
        f"{one.module.path.name}:{one.line}: {one.module.lines[one.line - 1].strip()}"
        for one in (where, *also)
    )
    # Tests cause failures on purpose, and say nothing about other code.
    unused = id[0] not in ALONE and is_excluded(script, where.node, where.module)
    if script.is_exhausted or unused or any(map(_in_test, (where, *also))):
        severity = "suspect"
    if severity == "error" and not _is_certain(script, id, where):
        severity = "suspect"
    file = path_to_show(script, where.module)
    fix = fix or entries[id].fix
    return Finding(id, severity, why, fix, file, where.line, evidence=evidence, edits=edits)


def _is_certain(script: Script, id: str, where: At) -> bool:
    """Return whether a job definitely reaches this place (with multiple ranks, if the failure needs
    them)."""
    scope = where.module.scope_of(where.node)
    reached = has_decided_tests(script, where.node, scope) and is_run(script, scope)
    return reached and (id[0] in ALONE or has_ranks(script))


def _in_test(where: At) -> bool:
    if where.module.name.startswith(TESTS):
        return True
    scope: Scope | None = where.module.scope_of(where.node)
    while scope is not None and not (scope.is_function and scope.name.startswith(TESTS)):
        scope = scope.parent
    return scope is not None


def path_to_show(script: Script, module: Module) -> str:
    """Return the path to show to the user: the script's as given, others relative to its folder."""
    if module is script.modules[0]:
        return str(script.path)
    relative = os.path.relpath(module.path, script.path.resolve().parent)
    return os.path.normpath(script.path.parent / relative)


def line_of(other: At, here: At) -> str:
    """Return `line 7`, or `line 7 of net.py` if that is another file."""
    if other.module is here.module:
        return f"line {other.line}"
    return f"line {other.line} of {other.module.path.name}"


def code(node: ast.AST | None, most: int = 60) -> str:
    """Return the code of a node on one line."""
    text = " ".join(ast.unparse(node).split()) if node is not None else "?"
    return text if len(text) <= most else text[: most - 1] + "…"


def replace(script: Script, module: Module, node: ast.AST, text: str) -> tuple[Edit, ...]:
    """Return an edit that replaces a one-line node with other code."""
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", -1)
    if first != last or not first:
        return ()
    line = module.lines[first - 1].encode()
    start, stop = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", 0)
    new = line[:start] + text.encode() + line[stop:]
    return (Edit(path_to_show(script, module), first, first, (new.decode(),)),)


def add_keyword(script: Script, call: Call, text: str) -> tuple[Edit, ...]:
    """Return an edit that adds a keyword argument at the end of a one-line call."""
    source = ast.get_source_segment(call.module.text, call.node)
    if source is None or not (call.node.args or call.node.keywords):
        return ()
    new = f"{source[:-1].rstrip().rstrip(',')}, {text})"
    return replace(script, call.module, call.node, new)


def insert(
    script: Script, module: Module, at: ast.stmt, text: str, after: bool = False
) -> tuple[Edit, ...]:
    """Return an edit that adds a line before or after a statement that is alone on its line."""
    indent = module.lines[at.lineno - 1][: at.col_offset]
    line = (at.end_lineno or at.lineno) + 1 if after else at.lineno
    return (
        ()
        if indent.strip()
        else (Edit(path_to_show(script, module), line, line - 1, (indent + text,)),)
    )


def insert_line(script: Script, where: Call, text: str, after: bool = False) -> tuple[Edit, ...]:
    """Return an edit that adds a line before or after a call's statement."""
    statement: ast.AST | None = where.node
    while statement is not None and not isinstance(statement, ast.stmt):
        statement = where.module.parents.get(statement)
    if not isinstance(statement, (ast.Expr, ast.Assign)):
        return ()
    return insert(script, where.module, statement, text, after)


def out_of_branch(script: Script, call: Call, branch: ast.AST) -> tuple[Edit, ...]:
    """Return an edit that moves the call above its `if …:`, if the call is the branch's first
    line."""
    if not isinstance(branch, ast.If) or branch.orelse:
        return ()
    body, lines = branch.body[0], call.module.lines
    header = lines[branch.lineno - 1]
    indent = header[: branch.col_offset]
    if indent.strip() or not header.split("#")[0].rstrip().endswith(":"):
        return ()
    one_line = body.lineno == body.end_lineno == branch.lineno + 1
    if not one_line or not any(part is call.node for part in ast.walk(body)):
        return ()
    moved = indent + lines[body.lineno - 1][body.col_offset :]
    left = (header,) if len(branch.body) > 1 else ()
    return (Edit(path_to_show(script, call.module), branch.lineno, body.lineno, (moved, *left)),)
