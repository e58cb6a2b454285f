"""The state of a symbolic run: names, the context stack, and what has happened so far."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paralab.doctor.script.values import (
    Branch,
    Call,
    Constant,
    Context,
    Happening,
    Leave,
    Made,
    Scope,
    Store,
    Value,
    either,
)

Key = tuple[Scope, str]
Changes = dict[Key, Value]
MOST_STEPS = 40_000  # statements; a script that calls itself in circles must end


class Names(dict[Key, Value]):
    """What names hold. A branch is run between `begin` and `undo`, which gives back what it has
    changed."""

    def __init__(self) -> None:
        super().__init__()
        self._before: list[dict[Key, Value | None]] = []

    def __setitem__(self, key: Key, value: Value) -> None:
        if self._before:
            self._before[-1].setdefault(key, self.get(key))
        super().__setitem__(key, value)

    def before(self, key: Key, value: Value) -> None:
        """What a name has held all along, before it is given a value for the first time; no branch
        undoes it."""
        if key not in self:
            super().__setitem__(key, value)

    def begin(self) -> None:
        self._before.append({})

    def undo(self) -> Changes:
        before = self._before.pop()
        changes = {key: self[key] for key in before}
        for key, old in before.items():
            if old is None:
                del self[key]
            else:
                super().__setitem__(key, old)
        return changes

    def update_all(self, changes: Changes) -> None:
        for key, value in changes.items():
            self[key] = value

    def join(self, one: Changes, other: Changes, *tests: Value) -> None:
        """What names hold after a branch: where the two ways differ, either."""
        for key in {**one, **other}:
            old = self.get(key)
            ways = [
                value for value in (one.get(key, old), other.get(key, old)) if value is not None
            ]
            self[key] = either(ways, tests)


class State:
    def __init__(self) -> None:
        self.names = Names()
        self.modules: dict[str, Scope] = {}  # modules of the script's folder, by dotted name
        self.globals_of: dict[
            tuple[Scope, str], Scope
        ] = {}  # names that a function has declared global or nonlocal
        self.stack: list[Context] = []
        self.happened: list[Happening] = []
        self.yields: list[tuple[tuple[Context, ...], Value]] = []
        self.files: list[Scope] = []  # the module under way
        self.steps = 0
        self.added_to: dict[
            str, list[ast.AugAssign]
        ] = {}  # attributes that count something, anywhere in the script
        self._stored: dict[ast.AST, list[ast.Name]] = {}

    def stored_in(self, node: ast.AST) -> list[ast.Name]:
        """The names that a function or a loop gives a value to, where it does so."""
        if node not in self._stored:
            names = (
                part
                for part in ast.walk(node)
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            )
            self._stored[node] = list(names)
        return self._stored[node]

    @property
    def context(self) -> tuple[Context, ...]:
        return tuple(self.stack)

    @property
    def file(self) -> Path:
        return self.files[-1].file

    @contextmanager
    def within(self, *contexts: Context) -> Iterator[None]:
        depth = len(self.stack)
        self.stack.extend(contexts)
        try:
            yield
        finally:
            del self.stack[depth:]

    def look_up(self, name: str, scope: Scope | None) -> Value | None:
        while scope is not None:
            found = self.names.get((self.globals_of.get((scope, name), scope), name))
            if found is not None:
                return found
            scope = scope.outer
        return None

    def record(self, of: type[Any], node: ast.AST, /, **fields: Any) -> Any:
        happening = of(len(self.happened), node, self.file, self.context, **fields)
        self.happened.append(happening)
        return happening

    def store(self, node: ast.AST, base: Value, name: str, value: Value) -> None:
        self.record(Store, node, base=base, name=name, value=value)
        if isinstance(value, Constant):
            for context in self.stack:
                if isinstance(
                    context, Branch
                ):  # a test remembers what is set to a number where it holds: counters start again
                    context.test.known.setdefault(("sets", context.taken), set()).add(name)

    def leave(self, node: ast.AST, kind: str, value: Value | None = None) -> None:
        self.record(Leave, node, kind=kind, value=value)

    def made(self, target: str, node: ast.AST, args: tuple[Value, ...]) -> Made:
        """The result of something that counts as a call of a library."""
        call: Call = self.record(Call, node, target=target, written=target, args=args)
        call.result = Made(call, parents=args)
        return call.result
