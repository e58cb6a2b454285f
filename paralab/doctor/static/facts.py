"""The facts about a script: every call with its context, and where names get their values.

for x, y in loader:                 Loop
    with model.no_sync():           With
        loss = f(model(x), y)       Call
    if rank == 0:                   If(taken=True)
        dist.barrier()              Call torch.distributed.barrier
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from paralab.doctor.static.names import DDP, DP, canonical, last_names
from paralab.doctor.static.project import (
    FUNCTIONS,
    SCOPES,
    Definition,
    Module,
    Project,
    Scope,
    dotted_key,
    end,
    find_module,
    position,
    search_path,
    walk,
)

# Methods that return what they are called on.
SAME_VALUE = frozenset(
    (
        "to cuda cpu float half bfloat16 double train eval detach clone contiguous requires_grad_ "
        "share_memory apply"
    ).split()
)
# Method names that are too common to identify a project class.
_COMMON_METHODS = frozenset(
    (
        "step update save load close train eval forward backward reset add append get set run "
        "init write log items keys values pop copy start stop join put state_dict load_state_dict "
        "parameters to cuda zero_grad read print format size item mean sum __init__ "
        "scale unscale_ clip_grad_norm_ no_sync"
    ).split()
)

DEEPEST = 40


@dataclass(frozen=True)
class If:
    """A test on the path to a node. `exits`: the other branch ends in return, raise, break, …"""

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
C = TypeVar("C", bound=Context)


@dataclass(eq=False, repr=False)
class Call:
    """One call in the source. `target` is a library's canonical name, `function` a project scope."""

    node: ast.Call
    scope: Scope
    script: Facts

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
        found = self._resolved
        if isinstance(found, Scope) and found.is_class:
            return self.script.method(found, "__init__")
        return found if isinstance(found, Scope) else None

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
                if definition.how == "assign" and isinstance(definition.value, ast.Attribute):
                    return definition.value.attr
        return self.method

    @property
    def receiver(self) -> ast.expr | None:
        return self.node.func.value if isinstance(self.node.func, ast.Attribute) else None

    def argument(self, place: int, name: str) -> ast.expr | None:
        for keyword in self.node.keywords:
            if keyword.arg == name:
                return keyword.value
        given = self.node.args
        if 0 <= place < len(given) and not any(
            isinstance(one, ast.Starred) for one in given[: place + 1]
        ):
            return given[place]
        return None

    @property
    def unpacks(self) -> bool:
        """Whether `f(*args)` or `f(**options)` may hide arguments."""
        return any(keyword.arg is None for keyword in self.node.keywords) or any(
            isinstance(one, ast.Starred) for one in self.node.args
        )

    @cached_property
    def context(self) -> tuple[Context, ...]:
        return self.script.context(self.node, self.module)

    def inside(self, kind: type[C]) -> list[C]:
        return [one for one in self.context if isinstance(one, kind)]


class Facts:
    """All facts about one script and the local modules it imports."""

    def __init__(self, path: Path, project: Project | None = None) -> None:
        self.path = path
        self.modules = (project or Project()).load(path)
        self._folders = search_path(path)
        self._by_path = {module.path: module for module in self.modules}
        self._contexts: dict[ast.AST, tuple[Context, ...]] = {}
        self._resolved: dict[ast.AST, str | Scope | None] = {}
        self._busy: set[ast.AST] = set()
        self._callers: dict[Scope, list[Call]] = {}
        self._makers: dict[ast.AST, list[Call]] = {}
        self._found_modules: dict[str, Module | None] = {}
        self._names: dict[tuple[str, Scope], str | Scope | None] = {}
        self._within: dict[ast.expr, list[Call]] = {}
        self._parts: dict[ast.AST, list[ast.AST]] = {}
        self._matching: dict[re.Pattern[str], list[Call]] = {}
        self._depth = 0

    # --- facts

    @cached_property
    def calls(self) -> list[Call]:
        """Every call: those of the script first, and each module in source order."""
        return [Call(node, scope, self) for module in self.modules for node, scope in module.calls]

    @cached_property
    def call_at(self) -> dict[ast.AST, Call]:
        return {call.node: call for call in self.calls}

    def calls_within(self, node: ast.expr, scope: Scope) -> list[Call]:
        """Return the calls of a scope in an expression, inner calls first."""
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
        found: dict[str, list[Call]] = defaultdict(list)
        for call in self.calls:
            found[call.last_name].append(call)
        return found

    def calls_of(self, *targets: str) -> list[Call]:
        """Return the calls of library functions, by their canonical names."""
        return [
            call
            for target in targets
            for name in last_names(target)
            for call in self._by_last_name.get(name, [])
            if call.target == target
        ]

    def methods(self, *names: str) -> list[Call]:
        """Return calls by the last part of the name: `methods("backward")`."""
        return [call for name in names for call in self._by_last_name.get(name, [])]

    def callers(self, function: Scope) -> list[Call]:
        """Return the calls that run a project function."""
        if function not in self._callers:
            self._callers[function] = []  # a cycle adds nothing
            owner = function.owner
            name = owner.name if owner and function.name == "__init__" else function.name
            named = [*self.methods(name), *(self.methods("__init__") if owner else [])]
            self._callers[function] = [call for call in named if call.function is function]
        return self._callers[function]

    @cached_property
    def scopes(self) -> list[Scope]:
        return [scope for module in self.modules for scope in module.scopes.values()]

    @cached_property
    def classes(self) -> list[Scope]:
        return [scope for scope in self.scopes if scope.is_class]

    @cached_property
    def attributes(self) -> dict[str, list[Definition]]:
        """Assignments to an attribute of anything but self, by the attribute's name."""
        found: dict[str, list[Definition]] = defaultdict(list)
        for scope in self.scopes:
            for key, definitions in scope.definitions.items():
                base, _, last = key.rpartition(".")
                if base and base not in ("self", "cls"):
                    found[last].extend(definitions)
        return found

    @cached_property
    def flags(self) -> dict[str, ast.Call]:
        """The `add_argument` call of each command-line option, by its attribute name."""
        found = {}
        for call in self.methods("add_argument"):
            names = [
                one.value
                for one in call.node.args
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            chosen = call.argument(99, "dest")
            long = [name for name in names if name.startswith("--")] or names
            if isinstance(chosen, ast.Constant):
                found[str(chosen.value)] = call.node
            elif long:
                found[long[0].lstrip("-").replace("-", "_")] = call.node
        return found

    def imports(self, *packages: str) -> bool:
        """Return whether any module imports one of these packages."""
        return any(
            definition.imported == name or definition.imported.startswith(f"{name}.")
            for scope in self.scopes
            for definitions in scope.definitions.values()
            for definition in definitions
            if definition.how == "import"
            for name in packages
        )

    # --- context

    def context(self, node: ast.AST, module: Module) -> tuple[Context, ...]:
        """Return the tests, loops, and with-blocks around a node in its function, outer first."""
        if node not in self._contexts:
            parent = module.parents.get(node)
            if parent is None or (isinstance(node, SCOPES) and not isinstance(node, ast.Lambda)):
                outer: tuple[Context, ...] = ()
                if parent is not None and isinstance(node, ast.ClassDef):
                    outer = ()
            else:
                outer = () if isinstance(parent, SCOPES) else self.context(parent, module)
            self._contexts[node] = (*outer, *self._step(node, parent))
        return self._contexts[node]

    def _step(self, node: ast.AST, parent: ast.AST | None) -> Iterator[Context]:
        """Yield what one level of nesting adds to the context."""
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
        if parent is not None and isinstance(node, ast.stmt):
            yield from self._left_before(node, parent)

    def _left_before(self, node: ast.stmt, parent: ast.AST) -> Iterator[If]:
        """Yield tests of earlier `if` statements in the block that have a branch that leaves it."""
        for block in blocks(parent):
            if not any(one is node for one in block):
                continue
            for before in block:
                if before is node:
                    return
                if isinstance(before, ast.If):
                    left, other = leaves(before.body), leaves(before.orelse)
                    if left and not other:
                        yield If(before, before.test, False, left)
                    elif other and not left:
                        yield If(before, before.test, True, other)

    # --- names

    def lookup(self, name: str, scope: Scope) -> tuple[Scope, list[Definition]] | None:
        """Return the scope that binds a name, and the name's definitions there."""
        here: Scope | None = scope
        while here is not None:
            usable = here is scope or not here.is_class
            if usable and name in here.definitions and name not in here.outer_names:
                return here, here.definitions[name]
            here = here.parent
        return None

    def resolve(self, node: ast.AST, scope: Scope) -> str | Scope | None:
        """Return a library's canonical name, or the project function or class that a name means."""
        if node in self._resolved:
            return self._resolved[node]
        if node in self._busy or self.is_too_deep():
            return None
        self._busy.add(node)
        self._depth += 1
        try:
            found = self._resolve(node, scope)
        finally:
            self._depth -= 1
            self._busy.discard(node)
        self._resolved[node] = found
        return found

    def deeper(self) -> Facts:
        """Count one level of nested lookups: `with self.deeper():`."""
        return self

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1

    def is_too_deep(self) -> bool:
        """Return whether lookups are nested too deeply; very long chains end as unknown."""
        return self._depth > DEEPEST

    def _resolve(self, node: ast.AST, scope: Scope) -> str | Scope | None:
        if isinstance(node, ast.Name):
            return self._resolve_name(node.id, scope)
        if isinstance(node, ast.Lambda):
            return scope.module.scopes.get(node)
        if not isinstance(node, ast.Attribute):
            return None
        key = dotted_key(node.value)
        if key in ("self", "cls"):
            owner = self.class_around(scope)
            if owner is None:
                return None
            found = self.method(owner, node.attr)
            if found is not None:
                return found
            return self._resolve_stored(owner, node.attr) or None
        if isinstance(node.value, ast.Call) and dotted_key(node.value.func) == "super":
            owner = self.class_around(scope)
            return self.method(owner, node.attr, own=False) if owner else None
        base = self.resolve(node.value, scope)
        if isinstance(base, str):
            return self._member(base, node.attr)
        if isinstance(base, Scope):
            if isinstance(base.node, ast.Module):
                return self._resolve_name(node.attr, base)
            return self.method(base, node.attr) if base.is_class else None
        return self._method_of_value(node, scope)

    def _resolve_name(self, name: str, scope: Scope) -> str | Scope | None:
        key = (name, scope)
        if key not in self._names:
            self._names[key] = None  # modules may import from each other
            self._names[key] = self._find_name(name, scope)
        return self._names[key]

    def _find_name(self, name: str, scope: Scope) -> str | Scope | None:
        found = self.lookup(name, scope)
        if found is None:
            return f"builtins.{name}"
        definitions = found[1]
        for definition in definitions:
            if definition.how in ("function", "class"):
                return definition.scope.module.scopes[definition.node]
            if definition.how == "import":
                return self._imported(definition.imported)
        values = [definition.value for definition in definitions if definition.how == "assign"]
        if len(values) == len(definitions) == 1 and isinstance(
            values[0], (ast.Name, ast.Attribute)
        ):
            return self.resolve(values[0], found[0])
        return None

    def _resolve_stored(self, owner: Scope, attribute: str) -> str | Scope | None:
        """Resolve a stored name such as `self.DDP = torch.nn.parallel.DistributedDataParallel`."""
        for definition in self.stored(owner, attribute):
            if isinstance(definition.value, (ast.Name, ast.Attribute)):
                found = self.resolve(definition.value, definition.scope)
                if isinstance(found, Scope) or (isinstance(found, str) and "." in found):
                    return found
        return None

    def _imported(self, dotted: str) -> str | Scope | None:
        module = self._module(dotted)
        if module is not None:
            return module.scope
        base, _, last = dotted.rpartition(".")
        module = self._module(base) if base else None
        if module is not None:
            return self._resolve_name(last, module.scope) or canonical(dotted)
        return canonical(dotted)

    def _module(self, dotted: str) -> Module | None:
        if dotted not in self._found_modules:
            path = find_module(dotted, self._folders)
            self._found_modules[dotted] = self._by_path.get(path) if path else None
        return self._found_modules[dotted]

    def _member(self, base: str, name: str) -> str | Scope | None:
        module = None if base.startswith(("builtins.", "torch")) else self._module(base)
        if module is not None:
            return self._resolve_name(name, module.scope)
        return canonical(f"{base}.{name}")

    def _method_of_value(self, node: ast.Attribute, scope: Scope) -> str | Scope | None:
        """Resolve `scaler.step` to `torch.amp.GradScaler.step` if a GradScaler made the value."""
        for made in self.makers(node.value, scope):
            target = made.made
            if target is not None:
                found = self.method(target, node.attr)
                if found is not None:
                    return found
            elif made.target in (DDP, DP) and node.attr == "module":
                return None  # the inner model
            elif made.target and made.target.rpartition(".")[2][:1].isupper():
                return canonical(f"{made.target}.{node.attr}")
        if node.attr in _COMMON_METHODS:
            return None
        named = self._methods_by_name.get(node.attr, [])
        return named[0] if len(named) == 1 else None

    @cached_property
    def _methods_by_name(self) -> dict[str, list[Scope]]:
        found: dict[str, list[Scope]] = defaultdict(list)
        for scope in self.scopes:
            if scope.owner is not None:
                found[scope.name].append(scope)
        return found

    def makers(self, node: ast.expr, scope: Scope, depth: int = 0) -> list[Call]:
        """Return the calls that may have made a value, through names, attributes, and functions."""
        if node not in self._makers:
            if depth > 8 or self.is_too_deep():
                return []
            self._makers[node] = []  # a cycle adds nothing
            with self.deeper():
                self._makers[node] = list(dict.fromkeys(self._find_makers(node, scope, depth)))
        return self._makers[node]

    def _find_makers(self, node: ast.expr, scope: Scope, depth: int) -> Iterator[Call]:
        if isinstance(node, ast.Call):
            call = self.call_at.get(node)
            if call is None:
                return
            if call.method in SAME_VALUE and call.receiver is not None:
                yield from self.makers(call.receiver, scope, depth + 1)
            elif call.function is not None and call.made is None:
                for value in call.function.returns:
                    yield from self.makers(value, call.function, depth + 1)
            else:
                yield call
        elif isinstance(node, ast.IfExp):
            yield from self.makers(node.body, scope, depth + 1)
            yield from self.makers(node.orelse, scope, depth + 1)
        elif isinstance(node, ast.Attribute) and node.attr == "module":
            for call in self.makers(node.value, scope, depth + 1):
                inner = call.argument(0, "module")
                if call.target in (DDP, DP) and inner is not None:
                    yield from self.makers(inner, call.scope, depth + 1)
        else:
            for definition in self.reaching(node, scope):
                if definition.how == "assign" and definition.value is not None:
                    yield from self.makers(definition.value, definition.scope, depth + 1)
                elif definition.how == "parameter":
                    for value, where in self.arguments_for(definition):
                        yield from self.makers(value, where, depth + 1)
                elif definition.how == "item" and definition.index is None:
                    for value, where in self._elements(definition.value, definition.scope):
                        yield from self.makers(value, where, depth + 1)

    def _elements(
        self, node: ast.expr | None, scope: Scope, depth: int = 0
    ) -> Iterator[tuple[ast.expr, Scope]]:
        """Yield the elements of a list that is a literal somewhere."""
        if isinstance(node, (ast.List, ast.Tuple)):
            yield from ((one, scope) for one in node.elts)
        elif isinstance(node, (ast.Name, ast.Attribute)) and depth < 8:
            for definition in self.reaching(node, scope):
                if definition.how == "parameter":
                    for value, where in self.arguments_for(definition):
                        yield from self._elements(value, where, depth + 1)
                elif definition.how == "assign":
                    yield from self._elements(definition.value, definition.scope, depth + 1)

    # --- classes

    def class_around(self, scope: Scope) -> Scope | None:
        return scope.class_around

    def calls_in_class(self, owner: Scope) -> list[Call]:
        """Return the calls in a class and its methods."""
        return self._calls_by_class.get(owner, [])

    @cached_property
    def _calls_by_class(self) -> dict[Scope, list[Call]]:
        found: dict[Scope, list[Call]] = defaultdict(list)
        for call in self.calls:
            if call.scope.class_around is not None:
                found[call.scope.class_around].append(call)
        return found

    def bases(self, owner: Scope) -> list[Scope | str]:
        assert isinstance(owner.node, ast.ClassDef)
        where = owner.parent or owner
        found = [self.resolve(base, where) for base in owner.node.bases]
        return [one for one in found if one is not None]

    def ancestors(self, owner: Scope) -> list[Scope | str]:
        """Return the class itself and everything it inherits from."""
        found: list[Scope | str] = [owner]
        for one in found:
            if isinstance(one, Scope) and one.is_class:
                found.extend(base for base in self.bases(one) if base not in found)
        return found

    def is_a(self, owner: Scope, *names: str) -> bool:
        """Return whether a class derives from a library class with one of these last names."""
        return any(
            isinstance(one, str) and one.rpartition(".")[2] in names
            for one in self.ancestors(owner)
        )

    def method(
        self, owner: Scope, name: str, own: bool = True, inherited: bool = True
    ) -> Scope | None:
        if not owner.is_class:  # a module
            found = self._resolve_name(name, owner) if name in owner.definitions else None
            return found if isinstance(found, Scope) else None
        lines = self.ancestors(owner) if inherited else [owner]
        for one in lines[0 if own else 1 :]:
            if isinstance(one, Scope) and one.is_class:
                for definition in one.definitions.get(name, []):
                    if definition.how == "function":
                        return one.module.scopes[definition.node]
        return None

    def stored(self, owner: Scope, attribute: str) -> list[Definition]:
        """Return everything that is stored in `self.attribute`, including by base classes."""
        found = []
        for one in self.ancestors(owner):
            if isinstance(one, Scope) and one.is_class:
                found.extend(one.definitions.get(attribute, []))
                for scope in one.module.scopes_by_class[one]:
                    found.extend(scope.definitions.get(f"self.{attribute}", []))
        return found

    # --- where a value comes from

    def reaching(self, node: ast.AST, scope: Scope, rank: int | None = None) -> list[Definition]:
        """Return the definitions whose value a name or attribute may hold here (on this rank)."""
        key = dotted_key(node)
        if key is None:
            return []
        found = self.lookup(key, scope)
        if found is not None:
            where, definitions = found
            at = node if where is scope else None
            reached = self._reach(definitions, at, where, rank)
            if (
                isinstance(scope.node, ast.Lambda) and where is scope.parent
            ):  # this may run now or later
                here = self._reach(definitions, scope.node, where, rank)
                reached += [one for one in here if one not in reached]
            return reached
        if key.startswith(("self.", "cls.")) and key.count(".") == 1:
            owner = self.class_around(scope)
            return self.stored(owner, key.partition(".")[2]) if owner else []
        if "." in key:
            name = key.rpartition(".")[2]
            return self.attributes.get(name) or self._own_attributes.get(name, [])
        return []

    @cached_property
    def _own_attributes(self) -> dict[str, list[Definition]]:
        """Definitions `self.name = …` by name, where only one class has that name."""
        found: dict[str, dict[Scope, list[Definition]]] = defaultdict(lambda: defaultdict(list))
        for scope in self.scopes:
            owner = scope.class_around
            for key, definitions in scope.definitions.items():
                if owner is not None and key.startswith("self.") and key.count(".") == 1:
                    found[key.removeprefix("self.")][owner].extend(definitions)
        return {
            name: next(iter(owners.values())) for name, owners in found.items() if len(owners) == 1
        }

    def _reach(
        self, definitions: list[Definition], node: ast.AST | None, scope: Scope, rank: int | None
    ) -> list[Definition]:
        """Walk back from a use (None: from the end of the scope) to its definition."""
        use = self.context(node, scope.module) if node is not None else ()
        found: list[Definition] = []
        for definition in reversed(definitions):
            around = self._around(definition)
            if node is not None and _begins(definition) > position(node):
                if _share_loop(around, use):
                    found.append(definition)  # value from the previous iteration
                continue
            ways = [
                self.decide(one, definition.scope, rank)
                for one in around
                if isinstance(one, If) and one not in use
            ]
            if _exclusive(around, use) or False in ways:
                continue
            found.append(definition)
            loops = [one for one in around if isinstance(one, (Loop, Except)) and one not in use]
            if None not in ways and not loops and definition.how != "augmented":
                break
        return found[::-1]

    def _around(self, definition: Definition) -> tuple[Context, ...]:
        if definition.how == "parameter":
            return ()
        around = self.context(definition.node, definition.scope.module)
        if isinstance(definition.node, (ast.For, ast.AsyncFor, ast.comprehension)):
            return (*around, Loop(definition.node))
        return around

    def decide(self, test: If, scope: Scope, rank: int | None) -> bool | None:
        """Return whether a multi-rank job takes this branch, or None if unknown."""
        raise NotImplementedError

    def arguments_for(self, definition: Definition) -> Iterator[tuple[ast.expr, Scope]]:
        """Yield what callers pass for a parameter, each with the caller's scope."""
        function = definition.scope
        names = [one.arg for one in function.parameters]
        if definition.name not in names:
            return
        place = names.index(definition.name)
        method = function.owner is not None and not _is_static(function)
        for call in self.callers(function):
            bound = method and (call.made is not None or isinstance(call.node.func, ast.Attribute))
            value = call.argument(place - 1 if bound else place, definition.name)
            if value is not None:
                yield value, call.scope
            elif not call.unpacks:
                default = default_of(function, definition.name)
                if default is not None:
                    yield default, function.parent or function


def default_of(function: Scope, name: str) -> ast.expr | None:
    if not isinstance(function.node, FUNCTIONS):
        return None
    arguments = function.node.args
    ordered = [*arguments.posonlyargs, *arguments.args]
    for argument, default in zip(ordered[::-1], arguments.defaults[::-1], strict=False):
        if argument.arg == name:
            return default
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if argument.arg == name:
            return value
    return None


def _is_static(function: Scope) -> bool:
    decorators = getattr(function.node, "decorator_list", [])
    return any(dotted_key(one) == "staticmethod" for one in decorators)


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


EXITS = ("sys.exit", "exit", "quit", "os._exit")


def leaves(block: list[ast.stmt]) -> str:
    """Return how a block always ends early (return, raise, break, continue, exit), or ""."""
    for statement in block:
        match statement:
            case ast.Return():
                return "return"
            case ast.Raise():
                return "raise"
            case ast.Break():
                return "break"
            case ast.Continue():
                return "continue"
            case ast.Expr(ast.Call(function)) if dotted_key(function) in EXITS:
                return "exit"
            case ast.If() if statement.orelse:
                left, other = leaves(statement.body), leaves(statement.orelse)
                if left and other:
                    return left
            case ast.With():
                left = leaves(statement.body)
                if left:
                    return left
    return ""


def _share_loop(one: tuple[Context, ...], other: tuple[Context, ...]) -> bool:
    return any(isinstance(part, Loop) and part in other for part in one)


def _exclusive(one: tuple[Context, ...], other: tuple[Context, ...]) -> bool:
    """Return whether two nodes are in different branches of one test."""
    taken = {(part.node, part.test): part.taken for part in other if isinstance(part, If)}
    return any(
        isinstance(part, If) and taken.get((part.node, part.test), part.taken) != part.taken
        for part in one
    )


def _begins(definition: Definition) -> tuple[int, int]:
    """Return where a definition takes effect: after its statement, or in its block."""
    node = definition.node
    if isinstance(node, (ast.For, ast.AsyncFor, ast.With, ast.AsyncWith)):
        return position(node.body[0])
    if isinstance(node, (ast.comprehension, ast.arg)):
        return 0, 0
    if isinstance(node, ast.NamedExpr):
        return position(node)
    return end(node)
