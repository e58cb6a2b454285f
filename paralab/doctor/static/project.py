"""The script and the local modules it imports, parsed, with parent links and resolved names.

Nothing is executed, and torch is not imported. Imports resolve from the script's folder and from
its project root, so the working directory does not change the answer.
"""

from __future__ import annotations

import ast
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from paralab.doctor.sources import lines_of, python_of
from paralab.doctor.static.names import canonical
from paralab.errors import UsageError

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCOPES = (*FUNCTIONS, ast.ClassDef, ast.Module)
ROOT_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
MOST_MODULES = 40
VERSION = "{}.{}".format(*sys.version_info)


@dataclass(eq=False, repr=False)
class Definition:
    """One place that gives a name its value.

    `how`: assign, item (an element of `value`), augmented, parameter, import, function, class.
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
    """A module, a class, or a function. `definitions` holds the names it binds."""

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
        """The class itself, or the class that a method or a function in it belongs to."""
        return self if self.is_class else self.parent and self.parent.class_around

    @cached_property
    def parameters(self) -> list[ast.arg]:
        if not isinstance(self.node, FUNCTIONS):
            return []
        arguments = self.node.args
        return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]

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

    @cached_property
    def lines(self) -> list[str]:
        return [line.rstrip("\r\n") for line in lines_of(self.text)]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(walk(self.tree))

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

    def nodes_in(self, scope: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes of one scope in source order, without nested functions and classes."""
        waiting = children(scope)[::-1]
        while waiting:
            node = waiting.pop()
            yield node
            if not isinstance(node, SCOPES):
                waiting.extend(children(node)[::-1])


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
                for name in _imported_modules(node, module, folders):
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
        """Return the module in a file. If invalid: None, or an error that calls it `shown`."""
        if path not in self._parsed:
            try:
                self._parsed[path] = _parse(path, shown or path)
            except UsageError:
                self._parsed[path] = None
        module = self._parsed[path]
        if module is None and shown:
            _parse(path, shown)  # raises again
        return module


def _parse(path: Path, shown: Path) -> Module:
    try:
        text = python_of(path)
        tree = ast.parse(text, str(path))
    except OSError as error:
        raise UsageError(
            f"Cannot read {shown}: {error.strerror}.", fix="the path of a Python file"
        ) from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise UsageError(
            f"{shown}{f':{line}' if line else ''} is not valid Python {VERSION}: "
            f"{getattr(error, 'msg', None) or type(error).__name__}.",
            fix="a file that Python can parse",
        ) from error
    module = Module(path, path.stem, text, tree)
    _link(module)
    return module


def search_path(script: Path) -> list[Path]:
    """Return the folders for local imports: the script's own and those above it, up to the root."""
    return _search_path(script.resolve().parent)


@cache
def _search_path(here: Path) -> list[Path]:
    ways = [here, *here.parents[:6]]
    root = next((at for at in ways if any((at / mark).exists() for mark in ROOT_MARKS)), None)
    if root is None:  # not in a project: use the folder above the outermost package
        root = next((at for at in ways if not (at / "__init__.py").exists()), here)
    folders = ways[: ways.index(root) + 1]
    return [*folders, *(folder / "src" for folder in folders if (folder / "src").is_dir())]


def find_module(name: str, folders: list[Path]) -> Path | None:
    """Return the file of a dotted module name."""
    return _find_module(name, tuple(folders))


@cache
def _find_module(name: str, folders: tuple[Path, ...]) -> Path | None:
    first = name.partition(".")[0]
    for folder in folders:
        if first not in _entries(folder):
            continue
        path = folder / name.replace(".", "/")
        for file in (path.with_name(path.name + ".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


@cache
def _entries(folder: Path) -> set[str]:
    """Return the modules and packages in a folder."""
    try:
        return {entry.name.removesuffix(".py") for entry in os.scandir(folder)}
    except OSError:
        return set()


def _imported_modules(node: ast.AST, module: Module, folders: list[Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = absolute(node, module, folders)
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def absolute(node: ast.ImportFrom, module: Module, folders: list[Path]) -> str:
    """Return the dotted module of a from-import; relative ones start at the module's folder."""
    if not node.level:
        return node.module or ""
    here = module.path.parent
    for _ in range(node.level - 1):
        here = here.parent
    for folder in folders:
        if here == folder or folder in here.parents:
            parts = [*here.relative_to(folder).parts, *(node.module or "").split(".")]
            return ".".join(part for part in parts if part)
    return node.module or ""


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
    """Yield a node and all nodes below, nearest first: ast.walk without contexts and operators."""
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
            if kind in _DEFINING:
                _define(child, scope, inner)
            elif isinstance(child, ast.Call):
                module.calls.append((child, scope))
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
_DEFINING = frozenset(
    [
        *FUNCTIONS,
        ast.ClassDef,
        ast.Global,
        ast.Nonlocal,
        ast.Import,
        ast.ImportFrom,
        ast.Assign,
        ast.AnnAssign,
        ast.NamedExpr,
        ast.AugAssign,
        ast.For,
        ast.AsyncFor,
        ast.comprehension,
        ast.With,
        ast.AsyncWith,
    ]
)


def _define(node: ast.AST, scope: Scope, inner: Scope) -> None:
    def add(name: str, how: str, **more: object) -> None:
        target = scope
        if name in scope.outer_names:
            target = scope.module.scope
        target.definitions[name].append(Definition(name, how, node, scope, **more))  # type: ignore[arg-type]

    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            add(node.name, "function")
        case ast.ClassDef():
            add(node.name, "class")
        case ast.Global() | ast.Nonlocal():
            scope.outer_names.update(node.names)
        case ast.Import():
            for alias in node.names:
                if alias.asname:
                    add(alias.asname, "import", imported=alias.name)
                else:
                    first = alias.name.split(".")[0]
                    add(first, "import", imported=first)
        case ast.ImportFrom():
            folders = _search_path(scope.module.path.parent)
            base = absolute(node, scope.module, folders)
            for alias in node.names:
                add(alias.asname or alias.name, "import", imported=f"{base}.{alias.name}")
        case ast.Assign():
            for target in node.targets:
                _bind(target, node.value, add)
        case ast.AnnAssign() if node.value is not None:
            _bind(node.target, node.value, add)
        case ast.NamedExpr():
            _bind(node.target, node.value, add)
        case ast.AugAssign():
            value = ast.BinOp(node.target, node.op, node.value)
            ast.copy_location(value, node)
            key = dotted_key(node.target)
            if key:
                add(key, "augmented", value=value)
        case ast.For() | ast.AsyncFor():
            _bind_items(node.target, node.iter, add)
        case ast.comprehension():
            _bind_items(node.target, node.iter, add)
        case ast.With() | ast.AsyncWith():
            for item in node.items:
                if item.optional_vars is not None:
                    _bind(item.optional_vars, item.context_expr, add)
    if isinstance(node, FUNCTIONS):
        everything = [*inner.parameters, node.args.vararg, node.args.kwarg]
        for argument in everything:
            if argument is not None:
                inner.definitions[argument.arg].append(
                    Definition(argument.arg, "parameter", argument, inner)
                )


def _bind(target: ast.expr, value: ast.expr, add: object) -> None:
    """Record the names that an assignment binds: `a = v`, `self.a = v`, `a, b = v, w`."""
    assert callable(add)
    key = dotted_key(target)
    if key:
        add(key, "assign", value=value)
    elif isinstance(target, (ast.Tuple, ast.List)):
        pairs = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
        for index, part in enumerate(target.elts):
            if pairs:
                assert isinstance(value, (ast.Tuple, ast.List))
                _bind(part, value.elts[index], add)
            else:
                _bind_items(part, value, add, index)


def _bind_items(target: ast.expr, value: ast.expr, add: object, index: int | None = None) -> None:
    assert callable(add)
    if isinstance(target, ast.Starred):
        target = target.value
    key = dotted_key(target)
    if key:
        add(key, "item", value=value, index=index)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for number, part in enumerate(target.elts):
            _bind_items(part, value, add, number)


def dotted_key(node: ast.AST) -> str | None:
    """Return a dotted name such as `a`, `self.a`, or `args.rank`; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted_key(node.value)
        return f"{base}.{node.attr}" if base else None
    return None


def position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def end(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "end_lineno", 0) or 0, getattr(node, "end_col_offset", 0) or 0


__all__ = ["Definition", "Module", "Project", "Scope", "canonical"]
