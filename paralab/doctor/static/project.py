"""The script and the local modules it imports, parsed, with parent links and resolved names.

Nothing is executed, and torch is not imported.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from paralab.doctor.sources import lines_of, python_of
from paralab.doctor.static.bindings import bindings, dotted_key
from paralab.doctor.static.imports import find_module, imported_modules, search_path
from paralab.errors import UsageError

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCOPES = (*FUNCTIONS, ast.ClassDef, ast.Module)
MOST_MODULES = 40
VERSION = "{}.{}".format(*sys.version_info)


@dataclass(eq=False, repr=False)
class Definition:
    """A place that gives a name its value.

    `how` is assign, item (an element of `value`), augmented, parameter, import, function, or class.
    """

    name: str
    how: str
    node: ast.AST
    scope: Scope
    value: ast.expr | None = None
    index: int | None = None  # item: position in the unpacked tuple; None for loop items
    imported: str = ""


@dataclass(eq=False, repr=False)
class Scope:
    """A module, a class, or a function. `definitions` contains the names that it binds."""

    node: ast.AST
    module: Module
    parent: Scope | None
    name: str
    definitions: dict[str, list[Definition]] = field(default_factory=lambda: defaultdict(list))
    outer_names: set[str] = field(default_factory=set)  # global and nonlocal

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    @property
    def is_function(self) -> bool:
        return isinstance(self.node, FUNCTIONS)

    @property
    def owner(self) -> Scope | None:
        """The class of a method."""
        return self.parent if self.is_function and self.parent and self.parent.is_class else None

    @cached_property
    def class_around(self) -> Scope | None:
        """This class, or the class that contains this function."""
        return self if self.is_class else self.parent and self.parent.class_around

    @cached_property
    def stored(self) -> dict[str, list[Definition]]:
        """Everything that a class stores in `self.name`, by name."""
        found: dict[str, list[Definition]] = defaultdict(list)
        for scope in self.module.scopes_by_class[self]:
            for key, definitions in scope.definitions.items():
                if key.startswith("self."):
                    found[key.removeprefix("self.")].extend(definitions)
        return found

    @cached_property
    def parameters(self) -> list[ast.arg]:
        if not isinstance(self.node, FUNCTIONS):
            return []
        arguments = self.node.args
        return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]

    def default_of(self, name: str) -> ast.expr | None:
        if not isinstance(self.node, FUNCTIONS):
            return None
        arguments = self.node.args
        ordered = [*arguments.posonlyargs, *arguments.args]
        positional = zip(ordered[::-1], arguments.defaults[::-1], strict=False)
        keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        return next((value for one, value in (*positional, *keywords) if one.arg == name), None)

    @property
    def decorators(self) -> list[str]:
        """The last names of the decorators."""
        found = [getattr(one, "func", one) for one in getattr(self.node, "decorator_list", [])]
        return [(dotted_key(one) or "").rpartition(".")[2] for one in found]

    @cached_property
    def returns(self) -> list[ast.expr]:
        """The values that the function returns, without bare returns."""
        if isinstance(self.node, ast.Lambda):
            return [self.node.body]
        found = [node for node in self.module.nodes_in(self.node) if isinstance(node, ast.Return)]
        return [node.value for node in found if node.value is not None]


@dataclass(eq=False, repr=False)
class Module:
    path: Path
    name: str
    text: str
    tree: ast.Module
    scopes: dict[ast.AST, Scope] = field(default_factory=dict)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    calls: list[tuple[ast.Call, Scope]] = field(default_factory=list)  # in source order
    imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    contexts: dict[ast.AST, tuple[Any, ...]] = field(default_factory=dict)  # see static.context
    left_before: dict[ast.AST, tuple[Any, ...]] = field(default_factory=dict)
    _nodes_in: dict[ast.AST, list[ast.AST]] = field(default_factory=dict)

    @cached_property
    def lines(self) -> list[str]:
        return [line.rstrip("\r\n") for line in lines_of(self.text)]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(walk(self.tree))

    @cached_property
    def strings(self) -> frozenset[str]:
        """Every string constant."""
        values = (node.value for node in self.nodes if isinstance(node, ast.Constant))
        return frozenset(value for value in values if isinstance(value, str))

    @cached_property
    def imported(self) -> frozenset[str]:
        """The full name of everything that the module imports, in any scope."""
        every = (scope.definitions.values() for scope in self.scopes.values())
        definitions = (one for groups in every for group in groups for one in group)
        return frozenset(one.imported for one in definitions if one.how == "import")

    @cached_property
    def attributes_read(self) -> frozenset[str]:
        loads = (node for node in self.nodes if isinstance(node, ast.Attribute))
        return frozenset(node.attr for node in loads if isinstance(node.ctx, ast.Load))

    @cached_property
    def scopes_by_class(self) -> dict[Scope | None, list[Scope]]:
        found: dict[Scope | None, list[Scope]] = defaultdict(list)
        for scope in self.scopes.values():
            found[scope.class_around].append(scope)
        return found

    @property
    def scope(self) -> Scope:
        return self.scopes[self.tree]

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the innermost scope around a node (a function node belongs to its parent)."""
        current = self.parents.get(node)
        while current is not None and current not in self.scopes:
            current = self.parents.get(current)
        return self.scopes[current if current is not None else self.tree]

    def nodes_in(self, scope: ast.AST) -> list[ast.AST]:
        """Return the nodes of one scope in source order, without nested functions and classes."""
        if scope not in self._nodes_in:
            found = self._nodes_in[scope] = list[ast.AST]()
            waiting = children(scope)[::-1]
            while waiting:
                found.append(node := waiting.pop())
                if not isinstance(node, SCOPES):
                    waiting.extend(children(node)[::-1])
        return self._nodes_in[scope]


class Project:
    """Modules by path. Scripts of one project share parsed modules."""

    def __init__(self) -> None:
        self._parsed: dict[Path, Module | None] = {}

    @property
    def num_parsed(self) -> int:
        return len(self._parsed)

    def load(self, script: Path) -> list[Module]:
        """Return the script first, then the local modules it imports, breadth first."""
        first = self._parse(script.resolve(), shown=script)
        assert first is not None
        folders = search_path(script)
        modules, seen = [first], {first.path}
        for module in modules:
            for node in module.imports:
                for name in imported_modules(node, module.path, folders):
                    if len(modules) >= MOST_MODULES:
                        return modules
                    path = find_module(name, folders)
                    if path is None or path in seen:
                        continue
                    seen.add(path)
                    found = self._parse(path)
                    if found is not None:
                        modules.append(found)
        return modules

    def _parse(self, path: Path, shown: Path | None = None) -> Module | None:
        """Return the module in a file. If the file is invalid, return None or, with `shown`, raise
        an error that names `shown`."""
        if path not in self._parsed:
            try:
                self._parsed[path] = _parse(path, shown or path)
            except UsageError:
                self._parsed[path] = None
        module = self._parsed[path]
        if module is None and shown:
            _parse(path, shown)  # raises the error that names the file
        return module


def _parse(path: Path, shown: Path) -> Module:
    try:
        text = python_of(path)
        tree = ast.parse(text, str(path))
    except OSError as error:
        raise UsageError(
            f"Cannot read {shown}: {error.strerror}.", fix="the path of a Python file"
        ) from error
    except (RecursionError, MemoryError) as error:
        raise UsageError(
            f"{shown} is nested too deeply for Python {VERSION}.", fix="a simpler file"
        ) from error
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise UsageError(
            f"{shown}{f':{line}' if line else ''} is not valid Python {VERSION}: "
            f"{getattr(error, 'msg', error)}.",
            fix="a file that Python can parse",
        ) from error
    module = Module(path, path.stem, text, tree)
    _link(module)
    return module


# --- parent links and definitions


_NO_CHILDREN = frozenset(
    [ast.Name, ast.Constant, ast.Pass, ast.Break, ast.Continue, ast.Global, ast.alias]
)
_NOT_NODES = frozenset(["ctx", "op", "ops", "id", "attr", "level", "module", "type_comment"])
_fields: dict[type[ast.AST], tuple[str, ...]] = {kind: () for kind in _NO_CHILDREN}


def children(node: ast.AST) -> list[ast.AST]:
    """Return the nodes directly below a node, without contexts and operators: like
    ast.iter_child_nodes, but three times as fast."""
    kind = type(node)
    names = _fields.get(kind)
    if names is None:
        names = tuple(name for name in kind._fields if name not in _NOT_NODES)
        _fields[kind] = names
    found: list[ast.AST] = []
    for name in names:
        value = getattr(node, name, None)
        if value.__class__ is list:
            found += [one for one in value if isinstance(one, ast.AST)]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes below it, nearest first, like ast.walk without contexts and
    operators."""
    level = [node]
    while level:
        yield from level
        level = [child for one in level for child in children(one)]


def _link(module: Module) -> None:
    parents = module.parents
    module.scopes[module.tree] = Scope(module.tree, module, None, module.name)
    waiting: list[tuple[ast.AST, Scope]] = [(module.tree, module.scope)]
    while waiting:
        node, scope = waiting.pop()
        for child in children(node):
            parents[child] = node
            inner = scope
            kind = type(child)
            if kind in _SCOPE_KINDS:
                name = getattr(child, "name", "<lambda>")
                inner = Scope(child, module, scope, name)
                module.scopes[child] = inner
            if isinstance(child, ast.Call):
                module.calls.append((child, scope))
            elif kind not in _NEVER_DEFINES:
                _define(child, scope, inner)
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                module.imports.append(child)
            if kind not in _NO_CHILDREN:
                waiting.append((child, inner))
    module.calls.sort(key=lambda call: position(call[0]))
    module.imports.sort(key=position)
    for scope in module.scopes.values():
        for definitions in scope.definitions.values():
            if len(definitions) > 1:
                definitions.sort(key=lambda one: position(one.node))


_SCOPE_KINDS = frozenset(SCOPES)
# The most frequent nodes, which do not bind names.
_NEVER_DEFINES = _NO_CHILDREN - {ast.Global} | {ast.Attribute, ast.Expr, ast.keyword, ast.arg}


def _define(node: ast.AST, scope: Scope, inner: Scope) -> None:
    """Record the names that a statement binds, and the parameters of a function."""
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        scope.outer_names.update(node.names)
    for name, how, value, index, imported in bindings(node, scope.module.path):
        target = scope.module.scope if name in scope.outer_names else scope
        definition = Definition(name, how, node, scope, value, index, imported)
        target.definitions[name].append(definition)
    if isinstance(node, FUNCTIONS):
        for argument in (*inner.parameters, node.args.vararg, node.args.kwarg):
            if argument is not None:
                definition = Definition(argument.arg, "parameter", argument, inner)
                inner.definitions[argument.arg].append(definition)


def position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def end(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "end_lineno", 0) or 0, getattr(node, "end_col_offset", 0) or 0
