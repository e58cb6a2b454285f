"""Find where values come from: what a name refers to, which definitions reach a use, and which
calls created a value."""

from __future__ import annotations

import ast
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import cast

from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.context import Contexts, Except, If, Loop, are_exclusive, share_loop
from paralab.doctor.static.facts import SAME_VALUE, Call, Facts, group, once_per_node
from paralab.doctor.static.imports import find_module
from paralab.doctor.static.names import DDP, DP, SAMPLER, canonical
from paralab.doctor.static.project import (
    Definition,
    Module,
    Project,
    Scope,
    end,
    position,
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
Meaning = str | Scope | None  # a library's canonical name, or a project function or class
Value = tuple[ast.expr, Scope]


class Origins(Facts):
    def __init__(self, path: Path, project: Project | None = None) -> None:
        super().__init__(path, project)
        self._by_path = {module.path: module for module in self.modules}
        self._names: dict[tuple[str, Scope], Meaning] = {}
        self._ancestors: dict[Scope, list[Scope | str]] = {}
        self._stored: dict[tuple[Scope, str], list[Definition]] = {}

    # --- names

    @once_per_node(cast(Meaning, None))
    def resolve(self, node: ast.AST, scope: Scope) -> Meaning:
        """Return a library's canonical name, or the project function or class that a name means."""
        if isinstance(node, ast.Name):
            return self._resolve_name(node.id, scope)
        if isinstance(node, ast.Lambda):
            return scope.module.scopes.get(node)
        if not isinstance(node, ast.Attribute):
            return None
        owner = scope.class_around
        if dotted_key(node.value) in ("self", "cls"):
            method = owner and self.method(owner, node.attr)
            return method or (owner and self._resolve_stored(owner, node.attr))
        if isinstance(node.value, ast.Call) and dotted_key(node.value.func) == "super":
            return self.method(owner, node.attr, own=False) if owner else None
        base = self.resolve(node.value, scope)
        if isinstance(base, str):
            return self._member(base, node.attr)
        if isinstance(base, Scope):
            if isinstance(base.node, ast.Module):
                return self._resolve_name(node.attr, base)
            return self.method(base, node.attr) if base.is_class else None
        return self._method_of_value(node, scope)

    def _resolve_name(self, name: str, scope: Scope) -> Meaning:
        key = (name, scope)
        if key not in self._names:
            self._names[key] = None  # modules may import each other
            self._names[key] = self._find_name(name, scope)
        return self._names[key]

    def _find_name(self, name: str, scope: Scope) -> Meaning:
        found = self.lookup(name, scope)
        if found is None:
            return f"builtins.{name}"
        where, definitions = found
        for definition in definitions:
            if definition.how in ("function", "class"):
                return definition.scope.module.scopes[definition.node]
            if definition.how == "import":
                return self._imported(definition.imported)
        value = definitions[0].value if definitions[0].how == "assign" else None
        if len(definitions) == 1 and isinstance(value, ast.IfExp):  # `DDP if use_cuda else Other`
            ways = (self.resolve(value.body, where), self.resolve(value.orelse, where))
            return next((one for one in (DDP, SAMPLER) if one in ways), None)
        is_alias = len(definitions) == 1 and isinstance(value, (ast.Name, ast.Attribute))
        return self.resolve(value, where) if is_alias else None

    def _resolve_stored(self, owner: Scope, attribute: str) -> Meaning:
        """Resolve a stored name such as `self.DDP = torch.nn.parallel.DistributedDataParallel`."""
        for definition in self.stored(owner, attribute):
            if isinstance(definition.value, (ast.Name, ast.Attribute)):
                found = self.resolve(definition.value, definition.scope)
                if isinstance(found, Scope) or (isinstance(found, str) and "." in found):
                    return found
        return None

    def _imported(self, dotted: str) -> Meaning:
        module = self._module(dotted)
        if module is not None:
            return module.scope
        base, _, last = dotted.rpartition(".")
        module = self._module(base) if base else None
        known = self._resolve_name(last, module.scope) if module is not None else None
        return known or canonical(dotted)

    def _module(self, dotted: str) -> Module | None:
        path = find_module(dotted, self.folders)
        return self._by_path.get(path) if path else None

    def _member(self, base: str, name: str) -> Meaning:
        module = None if base.startswith(("builtins.", "torch")) else self._module(base)
        if module is not None:
            return self._resolve_name(name, module.scope)
        return canonical(f"{base}.{name}")

    def _method_of_value(self, node: ast.Attribute, scope: Scope) -> Meaning:
        """Resolve `scaler.step` to `torch.amp.GradScaler.step` if a GradScaler made the value."""
        for call in self.makers(node.value, scope):
            if call.made is not None:
                found = self.method(call.made, node.attr)
                if found is not None:
                    return found
            elif call.target in (DDP, DP) and node.attr == "module":
                return None  # `wrapper.module` is the inner model
            elif call.target.rpartition(".")[2][:1].isupper():
                return canonical(f"{call.target}.{node.attr}")
        named = [] if node.attr in _COMMON_METHODS else self._methods_by_name.get(node.attr, [])
        return named[0] if len(named) == 1 else None

    @cached_property
    def _methods_by_name(self) -> dict[str, list[Scope]]:
        return group((one for one in self.scopes if one.owner), lambda scope: scope.name)

    # --- classes

    def bases(self, owner: Scope) -> list[Scope | str]:
        assert isinstance(owner.node, ast.ClassDef)
        # `Sampler[int]` derives from Sampler.
        bases = [one.value if isinstance(one, ast.Subscript) else one for one in owner.node.bases]
        return [found for base in bases if (found := self.resolve(base, owner.parent or owner))]

    def ancestors(self, owner: Scope) -> list[Scope | str]:
        """Return the class itself and everything it inherits from."""
        if owner not in self._ancestors:
            found = self._ancestors[owner] = [owner]
            for one in found:
                if isinstance(one, Scope) and one.is_class:
                    found.extend(base for base in self.bases(one) if base not in found)
        return self._ancestors[owner]

    def is_a(self, owner: Scope, *names: str) -> bool:
        """Return whether a class derives from a library class with one of these last names."""
        return any(
            isinstance(one, str) and one.rpartition(".")[2] in names
            for one in self.ancestors(owner)
        )

    def method(self, owner: Scope, name: str, own: bool = True) -> Scope | None:
        """Return a method of a class or of its ancestors; without `own`, only of the ancestors."""
        for one in self.ancestors(owner)[0 if own else 1 :]:
            if isinstance(one, Scope) and one.is_class:
                for definition in one.definitions.get(name, []):
                    if definition.how == "function":
                        return one.module.scopes[definition.node]
        return None

    def stored(self, owner: Scope, attribute: str) -> list[Definition]:
        """Return everything that is stored in `self.attribute`, including by base classes."""
        key = (owner, attribute)
        if key not in self._stored:
            found = self._stored[key] = []
            for one in self.ancestors(owner):
                if isinstance(one, Scope) and one.is_class:
                    found += [*one.definitions.get(attribute, []), *one.stored.get(attribute, [])]
        return self._stored[key]

    # --- definitions

    def reaching(self, node: ast.AST, scope: Scope, rank: int | None = None) -> list[Definition]:
        """Return the definitions that may determine a name's or attribute's value here (on this
        rank)."""
        key = dotted_key(node)
        if key is None:
            return []
        found = self.lookup(key, scope)
        if found is not None:
            where, definitions = found
            reached = self._reach(definitions, node if where is scope else None, where, rank)
            if isinstance(scope.node, ast.Lambda) and where is scope.parent:  # may run later
                here = self._reach(definitions, scope.node, where, rank)
                reached += [one for one in here if one not in reached]
            return reached
        base, _, name = key.rpartition(".")
        if base in ("self", "cls"):
            return self.stored(scope.class_around, name) if scope.class_around else []
        return (self.attributes.get(name) or self._own_attributes.get(name, [])) if base else []

    @cached_property
    def _own_attributes(self) -> dict[str, list[Definition]]:
        """The definitions `self.name = …` by name, for names that only one class stores."""
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
        """Search backward for definitions, from a use or else from the end of the scope."""
        use = self.context(node, scope.module) if node is not None else ()
        found: list[Definition] = []
        for definition in reversed(definitions):
            around = self._around(definition)
            if node is not None and _begins(definition) > position(node):
                if share_loop(around, use):
                    found.append(definition)  # a definition from the previous iteration
                continue
            ways = [
                self.decide(one, definition.scope, rank)
                for one in around
                if isinstance(one, If) and one not in use
            ]
            if are_exclusive(around, use) or False in ways:
                continue
            found.append(definition)
            loops = [one for one in around if isinstance(one, (Loop, Except)) and one not in use]
            if None not in ways and not loops and definition.how != "augmented":
                break
        return found[::-1]

    def _around(self, definition: Definition) -> Contexts:
        if definition.how == "parameter":
            return ()
        around = self.context(definition.node, definition.scope.module)
        is_loop = isinstance(definition.node, (ast.For, ast.AsyncFor, ast.comprehension))
        return (*around, Loop(definition.node)) if is_loop else around

    def decide(self, test: If, scope: Scope, rank: int | None) -> bool | None:
        """Return whether a multi-rank job takes this branch, or None if that is unknown."""
        raise NotImplementedError

    # --- values

    def sources(self, definition: Definition) -> Iterator[Value]:
        """Yield the expressions that a definition gets its value from, each with its scope."""
        if definition.how == "parameter":
            yield from self.arguments_for(definition)
        elif definition.value is not None:
            yield definition.value, definition.scope

    def arguments_for(self, definition: Definition) -> Iterator[Value]:
        """Yield what callers pass for a parameter, each with the caller's scope."""
        function = definition.scope
        names = [one.arg for one in function.parameters]
        if definition.name not in names:
            return
        place = names.index(definition.name)
        is_method = function.owner is not None and "staticmethod" not in function.decorators
        for call in self.callers(function):
            is_bound = call.made is not None or isinstance(call.node.func, ast.Attribute)
            value = call.argument(place - (is_method and is_bound), definition.name)
            default = function.default_of(definition.name)
            if value is not None:
                yield value, call.scope
            elif not call.unpacks and default is not None:
                yield default, function.parent or function

    @once_per_node(list[Call]())
    def makers(self, node: ast.expr, scope: Scope) -> list[Call]:
        """Return the calls that may have made a value, through names, attributes, and functions."""
        return list(dict.fromkeys(self._find_makers(node, scope)))

    def _find_makers(self, node: ast.expr, scope: Scope) -> Iterator[Call]:
        if isinstance(node, ast.Call):
            call = self.call_at.get(node)
            if call is None:
                return
            if call.method in SAME_VALUE and call.receiver is not None:
                yield from self.makers(call.receiver, scope)
            elif call.function is not None and call.made is None:
                for value in call.function.returns:
                    yield from self.makers(value, call.function)
            else:
                yield call
        elif isinstance(node, ast.IfExp):
            yield from self.makers(node.body, scope)
            yield from self.makers(node.orelse, scope)
        elif isinstance(node, ast.Attribute) and node.attr == "module":
            for call in self.makers(node.value, scope):
                if call.target in (DDP, DP):
                    yield from self.makers(call.argument(0, "module"), call.scope)
        else:
            for definition in self.reaching(node, scope):
                values = self.sources(definition)
                if definition.how == "item":
                    values = iter(self.unpacked(definition))
                elif definition.how not in ("assign", "parameter"):
                    continue
                for value, where in values:
                    yield from self.makers(value, where)

    def unpacked(self, definition: Definition) -> list[Value]:
        """Return what a loop item or an unpacked name may refer to, if it comes from literal lists:
        `nets = [g, d]`, `g, d = nets`. Return an empty list if one of those lists is unknown."""
        index, value = definition.index, definition.value
        rows = list(self._rows(value, definition.scope, set())) if value is not None else []
        known = [(one.elts, where) for one, where in rows if isinstance(one, (ast.List, ast.Tuple))]
        if index is None:
            return [(one, where) for elements, where in known for one in elements]
        if len(known) < len(rows) or not _binds(definition.node, index, definition.name):
            return []
        starred = any(isinstance(one, ast.Starred) for elements, _ in known for one in elements)
        if starred or any(index >= len(elements) for elements, _ in known):
            return []
        return [(elements[index], where) for elements, where in known]

    def _rows(self, node: ast.expr, scope: Scope, seen: set[ast.AST]) -> Iterator[Value]:
        """Yield the expressions that a name or a call may stand for, each once."""
        if node in seen:
            return
        seen.add(node)
        call = self.call_at.get(node)
        if call is not None and call.function is not None and call.made is None:
            yield from ((one, call.function) for one in call.function.returns)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            for definition in self.reaching(node, scope):
                if definition.how in ("parameter", "assign"):
                    for value, where in self.sources(definition):
                        yield from self._rows(value, where, seen)
                else:
                    yield node, scope
        else:
            yield node, scope

    def ingredients(
        self, node: ast.expr, scope: Scope, hops: int = 20
    ) -> Iterator[tuple[ast.AST, Scope]]:
        """Yield each expression that a value is computed from, through names and functions."""
        seen: set[ast.AST] = set()
        waiting: deque[tuple[ast.expr, Scope, int]] = deque([(node, scope, 0)])  # nearest first
        while waiting and len(seen) < 400:
            value, where, depth = waiting.popleft()
            for part in self.parts(value):
                if part in seen:
                    continue
                seen.add(part)
                yield part, where
                more: list[Value] = []
                if isinstance(part, ast.Call) and part in self.call_at:
                    call = self.call_at[part]
                    if call.function is not None and call.made is None:
                        more += [(one, call.function) for one in call.function.returns]
                elif isinstance(part, (ast.Name, ast.Attribute)):
                    for definition in self.reaching(part, where):
                        more += self.sources(definition)
                if depth < hops:
                    waiting += [(one, at, depth + 1) for one, at in more]

    @once_per_node(list[Call]())
    def contributors(self, node: ast.expr, scope: Scope) -> list[Call]:
        """Return every call that contributed to a value."""
        parts = self.ingredients(node, scope)
        return [self.call_at[part] for part, _ in parts if part in self.call_at]


def _binds(node: ast.AST, index: int, name: str) -> bool:
    """Return whether an assignment binds a name to the element at this position."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(
        isinstance(target, (ast.Tuple, ast.List))
        and not any(isinstance(one, ast.Starred) for one in target.elts[:index])
        and index < len(target.elts)
        and dotted_key(target.elts[index]) == name
        for target in targets
    )


def _begins(definition: Definition) -> tuple[int, int]:
    """Return where a definition takes effect: after its statement, or at the start of its block."""
    node = definition.node
    if isinstance(node, (ast.For, ast.AsyncFor, ast.With, ast.AsyncWith)):
        return position(node.body[0])
    if isinstance(node, (ast.comprehension, ast.arg)):
        return 0, 0
    return position(node) if isinstance(node, ast.NamedExpr) else end(node)
