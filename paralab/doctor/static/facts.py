"""The facts about a script and the local modules it imports: every call, function, and class.

This module evaluates nothing. `origins` finds where values come from, and `values` computes them.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paralab.doctor.static.context import Context, Contexts, If, Loop, With, context_of, leaves
from paralab.doctor.static.imports import search_path
from paralab.doctor.static.names import DDP, SAMPLER, last_names
from paralab.doctor.static.project import Definition, Module, Project, Scope, end, walk

if TYPE_CHECKING:
    from paralab.doctor.static.script import Script

DEEPEST = 40  # maximum depth of nested lookups; deeper results are unknown
# Methods that return the object they are called on.
SAME_VALUE = frozenset(
    (
        "to cuda cpu float half bfloat16 double train eval detach clone contiguous requires_grad_ "
        "share_memory apply"
    ).split()
)
C = TypeVar("C", bound=Context)
Item = TypeVar("Item")
T = TypeVar("T")
Find = Callable[[Any, Any, Scope], T]


def once_per_node(in_cycle: T, too_deep: T | None = None) -> Callable[[Find[T]], Find[T]]:
    """Cache a method's results by node. In a cycle, or without a node, return `in_cycle`."""

    def decorate(find: Find[T]) -> Find[T]:
        @wraps(find)
        def ask(facts: Facts, node: ast.AST | None, scope: Scope) -> T:
            if node is None:
                return in_cycle
            known: dict[ast.AST, T] = facts.memory.setdefault(find, {})
            if node not in known:
                if facts.depth > DEEPEST:
                    return in_cycle if too_deep is None else too_deep
                known[node] = in_cycle
                facts.depth += 1
                try:
                    known[node] = find(facts, node, scope)
                finally:
                    facts.depth -= 1
            return known[node]

        return ask

    return decorate


@dataclass(eq=False, repr=False)
class Call:
    """One call in the source. It runs either the library function `target` (a canonical name) or
    the project function `function`."""

    node: ast.Call
    scope: Scope
    script: Script

    @property
    def module(self) -> Module:
        return self.scope.module

    @property
    def line(self) -> int:
        return self.node.lineno

    @cached_property
    def _resolved(self) -> str | Scope | None:
        return self.script.resolve(self.node.func, self.scope)

    @property
    def target(self) -> str:
        return self._resolved if isinstance(self._resolved, str) else ""

    @property
    def function(self) -> Scope | None:
        """The project function that runs; for a class, its `__init__`."""
        if self.made is not None:
            return self.script.method(self.made, "__init__")
        return self._resolved if isinstance(self._resolved, Scope) else None

    @property
    def made(self) -> Scope | None:
        """The project class that the call constructs."""
        found = self._resolved
        return found if isinstance(found, Scope) and found.is_class else None

    @property
    def method(self) -> str:
        function = self.node.func
        if isinstance(function, ast.Attribute):
            return function.attr
        return function.id if isinstance(function, ast.Name) else ""

    @cached_property
    def last_name(self) -> str:
        """The last part of the name, resolved through `import … as` and `DDP = nn.parallel.…`."""
        if isinstance(self.node.func, ast.Name):
            found = self.script.lookup(self.node.func.id, self.scope)
            for definition in found[1] if found else []:
                if definition.how == "import":
                    return definition.imported.rpartition(".")[2]
                value = definition.value
                if definition.how == "assign" and isinstance(value, ast.Attribute):
                    return value.attr
                if isinstance(value, ast.IfExp) and self.target in (DDP, SAMPLER):
                    return self.target.rpartition(".")[2]
        return self.method

    @property
    def receiver(self) -> ast.expr | None:
        return self.node.func.value if isinstance(self.node.func, ast.Attribute) else None

    @property
    def arguments(self) -> list[ast.expr]:
        return [*self.node.args, *(keyword.value for keyword in self.node.keywords)]

    def argument(self, place: int, name: str) -> ast.expr | None:
        for keyword in self.node.keywords:
            if keyword.arg == name:
                return keyword.value
        given = self.node.args[: place + 1]
        is_hidden = any(isinstance(one, ast.Starred) for one in given)
        return given[place] if 0 <= place < len(given) and not is_hidden else None

    @property
    def unpacks(self) -> bool:
        """Whether `f(*args)` or `f(**options)` may hide arguments."""
        return any(keyword.arg is None for keyword in self.node.keywords) or any(
            isinstance(one, ast.Starred) for one in self.node.args
        )

    @property
    def context(self) -> Contexts:
        return context_of(self.node, self.module)

    def inside(self, kind: type[C]) -> list[C]:
        return [one for one in self.context if isinstance(one, kind)]


class Facts:
    """All facts about one script. `memory` caches results that several checks need."""

    def __init__(self, path: Path, project: Project | None = None) -> None:
        self.path = path
        self.modules = (project or Project()).load(path)
        self.folders = search_path(path)
        self.memory: dict[Any, Any] = {}
        self.depth = 0
        self._callers: dict[Scope, list[Call]] = {}
        self._within: dict[ast.expr, list[Call]] = {}
        self._parts: dict[ast.AST, list[ast.AST]] = {}
        self._matching: dict[re.Pattern[str], list[Call]] = {}

    context = staticmethod(context_of)

    # --- calls

    @cached_property
    def calls(self) -> list[Call]:
        """Every call: the script's calls first, and each module's calls in source order."""
        script: Any = self
        return [Call(*found, script) for module in self.modules for found in module.calls]

    @cached_property
    def call_at(self) -> dict[ast.AST, Call]:
        return {call.node: call for call in self.calls}

    def calls_within(self, node: ast.expr, scope: Scope) -> list[Call]:
        """Return a scope's calls within an expression, inner calls first."""
        if node not in self._within:
            every = [self.call_at.get(one) for one in self.parts(node) if isinstance(one, ast.Call)]
            found = [call for call in every if call is not None and call.scope is scope]
            self._within[node] = sorted(found, key=lambda call: end(call.node))
        return self._within[node]

    def parts(self, node: ast.AST) -> list[ast.AST]:
        """Return an expression and everything in it, nearest first."""
        if node not in self._parts:
            self._parts[node] = list(walk(node))
        return self._parts[node]

    def calls_matching(self, pattern: re.Pattern[str]) -> list[Call]:
        """Return the calls whose last name contains the pattern."""
        if pattern not in self._matching:
            names = [name for name in self._by_last_name if pattern.search(name)]
            self._matching[pattern] = self.methods(*names)
        return self._matching[pattern]

    @cached_property
    def _by_last_name(self) -> dict[str, list[Call]]:
        return group(self.calls, lambda call: call.last_name)

    def calls_of(self, *targets: str) -> list[Call]:
        """Return the calls to library functions, by canonical name."""
        return [
            call
            for target in targets
            for call in self.methods(*last_names(target))
            if call.target == target
        ]

    def methods(self, *names: str) -> list[Call]:
        """Return calls by the last part of the name: `methods("backward")`."""
        return [call for name in names for call in self._by_last_name.get(name, [])]

    def callers(self, function: Scope) -> list[Call]:
        """Return the calls that run a project function."""
        if function not in self._callers:
            self._callers[function] = []  # a cycle adds no calls
            owner = function.owner
            name = owner.name if owner and function.name == "__init__" else function.name
            named = [*self.methods(name), *(self.methods("__init__") if owner else [])]
            self._callers[function] = [call for call in named if call.function is function]
        return self._callers[function]

    def calls_in(self, scope: Scope) -> list[Call]:
        return self._by_scope.get(scope, [])

    @cached_property
    def _by_scope(self) -> dict[Scope, list[Call]]:
        return group(self.calls, lambda call: call.scope)

    def calls_in_class(self, owner: Scope) -> list[Call]:
        """Return the calls in a class and its methods."""
        return self._by_class.get(owner, [])

    @cached_property
    def _by_class(self) -> dict[Scope | None, list[Call]]:
        return group(self.calls, lambda call: call.scope.class_around)

    def reached(self, function: Scope, depth: int = 3) -> list[Call]:
        """Return the calls in a function and in the project functions it calls."""
        known: dict[Scope, list[Call]] = self.memory.setdefault(Facts.reached, {})
        if function not in known:
            found = known[function] = list[Call]()
            seen, level = {function}, [function]
            for _ in range(depth):
                found += (here := [call for scope in level for call in self.calls_in(scope)])
                called = dict.fromkeys(call.function for call in here if call.function)
                level = [scope for scope in called if scope not in seen]
                seen.update(level)
        return known[function]

    # --- functions, classes, and options

    @cached_property
    def scopes(self) -> list[Scope]:
        return [scope for module in self.modules for scope in module.scopes.values()]

    def lookup(self, name: str, scope: Scope) -> tuple[Scope, list[Definition]] | None:
        """Return the scope that binds a name, and the name's definitions there."""
        here: Scope | None = scope
        while here is not None:
            usable = here is scope or not here.is_class
            if usable and name in here.definitions and name not in here.outer_names:
                return here, here.definitions[name]
            here = here.parent
        return None

    @cached_property
    def attributes(self) -> dict[str, list[Definition]]:
        """Assignments to attributes of objects other than self, by attribute name."""
        found: dict[str, list[Definition]] = defaultdict(list)
        for scope in self.scopes:
            for key, definitions in scope.definitions.items():
                base, _, last = key.rpartition(".")
                if base and base not in ("self", "cls"):
                    found[last].extend(definitions)
        return found

    @cached_property
    def strings(self) -> frozenset[str]:
        """Every string constant."""
        return frozenset[str]().union(*(module.strings for module in self.modules))

    @cached_property
    def flags(self) -> dict[str, ast.Call]:
        """The `add_argument` call of each command-line option, by its attribute name."""
        found = {}
        for call in self.methods("add_argument"):
            chosen = call.argument(99, "dest")
            names = [str(one.value) for one in call.node.args if isinstance(one, ast.Constant)]
            long = [name for name in names if name.startswith("--")] or names
            if isinstance(chosen, ast.Constant):
                found[str(chosen.value)] = call.node
            elif long:
                found[long[0].lstrip("-").replace("-", "_")] = call.node
        return found

    @cached_property
    def defaults(self) -> dict[str, ast.expr]:
        """The default of each setting by its name: of a command-line option, an absl flag, or a
        field of a configuration class."""
        found: dict[str, ast.expr] = {}
        for scope in self.scopes:
            for one in getattr(scope.node, "body", []) if scope.is_class else []:
                if (
                    isinstance(one, ast.AnnAssign)
                    and isinstance(one.target, ast.Name)
                    and one.value
                ):
                    found[one.target.id] = one.value
        for call in self.methods("DEFINE_integer", "DEFINE_string"):
            name, value = call.argument(0, "name"), call.argument(1, "default")
            if isinstance(name, ast.Constant) and value is not None:
                found[str(name.value)] = value
        for option, flag in self.flags.items():
            for one in flag.keywords:
                if one.arg == "default":
                    found[option] = one.value
        return found

    def imports(self, *packages: str) -> bool:
        """Return whether any module imports one of these packages."""
        return any(
            name in packages or name.startswith(tuple(f"{one}." for one in packages))
            for module in self.modules
            for name in module.imported
        )


def is_constant(node: ast.AST | None, value: object) -> bool:
    """Return whether a node is the literal True, False, "cpu", …"""
    return (
        isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value
    )


def names_in(node: ast.AST | None) -> set[str]:
    """Return the variables in an expression."""
    parts = ast.walk(node) if node is not None else ()
    return {part.id for part in parts if isinstance(part, ast.Name)}


def group(items: Iterable[Item], key: Callable[[Item], T]) -> dict[T, list[Item]]:
    found: dict[T, list[Item]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return found


__all__ = ["SAME_VALUE", "Call", "Context", "Facts", "If", "Loop", "With", "leaves"]
