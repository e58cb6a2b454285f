"""A training script as the rules see it: the symbolic run of the file and of the modules of its
folder that it imports.

Nothing of the script is executed, torch is not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paralab.doctor.collecting import nothing_collected
from paralab.doctor.script.naming import canonical
from paralab.doctor.script.statements import Run
from paralab.doctor.script.values import Call, Happening, Leave, Store
from paralab.doctor.sources import lines_of, python_of
from paralab.doctor.static.project import Project
from paralab.doctor.static.script import Script as StaticScript
from paralab.errors import UsageError


@dataclass(eq=False)
class Script:
    """`happened`: every call, store and leave, in program order. Loops are run once, both ways of a
    branch are taken, functions are run where they are called (so what happens in them is there once
    per call, with the caller's context)."""

    path: Path
    happened: list[Happening]
    trees: dict[Path, ast.Module]
    project: Project | None = None

    @cached_property
    def static(self) -> StaticScript:
        return StaticScript(self.path, self.project)

    @cached_property
    def nodes(self) -> dict[Path, list[ast.AST]]:
        """Every node of every file, from the outside in."""
        return {file: list(ast.walk(tree)) for file, tree in self.trees.items()}

    @property
    def all_nodes(self) -> Iterator[ast.AST]:
        return (node for nodes in self.nodes.values() for node in nodes)

    @cached_property
    def calls(self) -> list[Call]:
        return [happening for happening in self.happened if isinstance(happening, Call)]

    @cached_property
    def stores(self) -> list[Store]:
        return [happening for happening in self.happened if isinstance(happening, Store)]

    @cached_property
    def leaves(self) -> list[Leave]:
        return [happening for happening in self.happened if isinstance(happening, Leave)]

    @cached_property
    def _by_target(self) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.target, []).append(call)
        return found

    @cached_property
    def _by_method(self) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.method, []).append(call)
        return found

    def calls_of(self, *targets: str) -> Iterator[Call]:
        """Calls of these canonical names, in program order within each."""
        return (call for target in targets for call in self._by_target.get(target, []))

    def methods(self, *names: str) -> Iterator[Call]:
        """Calls of methods (or functions) by their last name, in program order:
        `methods("backward")`."""
        found = [call for name in names for call in self._by_method.get(name, [])]
        return iter(sorted(found, key=lambda call: call.number))

    def imports(self, *packages: str) -> bool:
        """Is one of these packages imported anywhere?"""
        return any(
            name.split(".")[0] in packages or name in packages
            for node in self.all_nodes
            for name in _imported(node)
        )

    def lines(self, file: Path) -> list[str]:
        return _lines(file)

    def shown(self, file: Path) -> str:
        """A file's name in findings: as the user gave it, or beside it."""
        return str(file)


def read_script(path: Path, project: Project | None = None) -> Script:
    try:
        text = python_of(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.", fix="the path of a Python file"
        ) from error
    run = Run(path.parent)
    try:
        with nothing_collected():
            run.module(path, _tree(path, text), "__main__")
            run.run_the_rest(path)
    except RecursionError as error:
        raise UsageError(
            f"{path} is nested too deeply to be followed.", fix="expressions of fewer parts"
        ) from error
    return Script(path, run.happened, run.sources, project)


def _tree(path: Path, text: str) -> ast.Module:
    try:
        return ast.parse(text, str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else str(path)
        raise UsageError(
            f"{place} is not Python: {getattr(error, 'msg', error)}.",
            fix="a file that Python can parse",
        ) from error


def _lines(file: Path) -> list[str]:
    return [line.rstrip("\r\n") for line in lines_of(python_of(file))]


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (canonical(alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
