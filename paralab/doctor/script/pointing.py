"""Findings of script rules: the place, the line of code as evidence, and short names for what
stands there."""

from __future__ import annotations

import ast
import contextlib
import io
import tokenize
from pathlib import Path

from paralab.doctor.finding import Edit, Finding, Severity
from paralab.doctor.script.reading import Script
from paralab.doctor.script.values import Branch, Computed, Entered, Happening, Value


def found(
    script: Script,
    id: str,
    severity: Severity,
    at: Happening,
    why: str,
    fix: str,
    *,
    also: tuple[Happening, ...] = (),
    edits: tuple[Edit, ...] = (),
) -> Finding:
    """A finding at a happening. `also`: other places that belong to the evidence."""
    evidence = tuple(
        f"{happening.file.name}:{happening.line}: {line_of(script, happening)}"
        for happening in (at, *also)
    )
    return Finding(
        id, severity, why, fix, script.shown(at.file), at.line, evidence=evidence, edits=edits
    )


def line_of(script: Script, at: Happening) -> str:
    """The line of code, without its comment."""
    lines = script.lines(at.file)
    line = lines[at.line - 1].strip() if at.line <= len(lines) else ""
    with contextlib.suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            if token.type == tokenize.COMMENT:
                return line[: token.start[1]].rstrip()
    return line


def place(other: Happening, at: Happening) -> str:
    """`line 7`, or `line 7 of net.py` where that is another file."""
    return (
        f"line {other.line}" if other.file == at.file else f"line {other.line} of {other.file.name}"
    )


def short(node: ast.AST | None, most: int = 60) -> str:
    """The code of a node, on one line."""
    text = " ".join(ast.unparse(node).split()) if node is not None else "?"
    return text if len(text) <= most else text[: most - 1] + "…"


def called(at: Happening) -> str:
    """What a call calls, as it is written: `self.model.module`."""
    return short(at.node.func) if isinstance(at.node, ast.Call) else short(at.node)


def test_of(branch: Branch) -> str:
    """A branch's test as it is written."""
    node = getattr(branch.node, "test", branch.node)
    if isinstance(node, ast.BoolOp) and node is branch.node:
        node = node.values[0]
    return short(node)


def by_way_of(at: Happening, branch: Branch) -> str:
    """How a branch of another function leads here: ", through `mean` in line 19 of loop.py"; empty
    in one function."""
    inside = at.context[at.context.index(branch) + 1 :] if branch in at.context else ()
    call = next(
        (context.call for context in inside if isinstance(context, Entered) and context.call), None
    )
    return f", through `{called(call)}` in {place(call, at)}" if call else ""


def file_of(script: Script, node: ast.AST) -> Path | None:
    """The file that a node is of. Values know their nodes, not their files."""
    return next((file for file, nodes in script.nodes.items() if node in nodes), None)


def node_of(value: Value) -> ast.AST | None:
    if isinstance(value, Computed):
        return value.node
    call = getattr(value, "call", None)
    return call.node if call else None
