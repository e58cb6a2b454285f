"""The calls that matter to a check, in the order in which they run, including those inside project
functions.

def update(loss):                 for x in loader:
    loss.backward()                   update(f(x))       backward, inside the loop
    optimizer.step()                                     step, inside the loop
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from paralab.doctor.static.collective_tree import called_object
from paralab.doctor.static.facts import Call, Context, If, Loop, With
from paralab.doctor.static.project import Scope, end
from paralab.doctor.static.script import Env, Script

DEEPEST = 6
MOST_EVENTS = 2_000
C = TypeVar("C", bound=Context)
Chain = tuple[Call, ...]


@dataclass(frozen=True, eq=False)
class Event:
    """A call and how it is reached. `chain` lists the calls from the root to its function.
    `path` lists the enclosing conditions, loops, and with-blocks, each with the chain to its
    function.
    """

    call: Call
    role: str
    chain: Chain
    path: tuple[tuple[Chain, Context], ...]

    @property
    def loops(self) -> list[tuple[Chain, Loop]]:
        return [(chain, item) for chain, item in self.path if isinstance(item, Loop)]

    def tests(self) -> dict[tuple[Chain, str], bool]:
        """Return the enclosing conditions, and which branch of each contains the call."""
        found = {}
        for chain, item in self.path:
            if isinstance(item, If):
                text, taken = condition(item)
                found[chain, text] = taken
        return found

    def blocks(self) -> Iterator[tuple[ast.expr, Scope]]:
        """Yield the context managers that enclose the call, each with its scope."""
        for chain, item in self.path:
            if isinstance(item, With):
                yield item.item, self.scope_at(chain)

    def scope_at(self, chain: Chain) -> Scope:
        """Return the function that contains the part of the path after this chain."""
        return self.chain[len(chain)].scope if len(chain) < len(self.chain) else self.call.scope


def condition(test: If) -> tuple[str, bool]:
    """Return a condition and whether it is true, without negations: `x is not None` becomes
    `x is None`, which is false."""
    node, taken = test.test, test.taken
    while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        node, taken = node.operand, not taken
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.IsNot, ast.NotEq)):
        positive = ast.Is() if isinstance(node.ops[0], ast.IsNot) else ast.Eq()
        node, taken = ast.Compare(node.left, [positive], node.comparators), not taken
    return ast.dump(node), taken


def excludes(one: Event, other: Event) -> bool:
    """Return whether two calls are in opposite branches of the same condition."""
    tests = other.tests()
    return any(tests.get(key, taken) != taken for key, taken in one.tests().items())


def extra_tests(one: Event, other: Event) -> list[tuple[Chain, If]]:
    """Return the conditions that enclose one call but not the other."""
    known = other.tests()
    return [
        (chain, item)
        for chain, item in one.path
        if isinstance(item, If) and (chain, condition(item)[0]) not in known
    ]


def occurrences(
    timelines: Iterable[list[Event]], *roles: str
) -> Iterator[tuple[list[Event], int, Event]]:
    """Yield each event with one of these roles, with its timeline and its position in it."""
    for events in timelines:
        for place, event in enumerate(events):
            if event.role in roles:
                yield events, place, event


class Timelines:
    """One list of events for each module, and for each function that none of the visited code
    calls."""

    def __init__(self, script: Script, role: Callable[[Call], str], methods: tuple[str, ...]):
        self.script, self.role = script, role
        self.methods = frozenset(methods)
        self.names = self._relevant_names()
        self.events: list[Event] = []
        self.walked: set[Scope] = set()

    def _relevant_names(self) -> set[str]:
        """Return the names of functions that contain relevant calls, directly or indirectly."""
        names = set(self.methods)
        scopes = {scope for scope in self.script.scopes if scope.is_function}
        while True:
            reached = {
                scope
                for scope in scopes
                if any(call.last_name in names for call in self.script.calls_in(scope))
            }
            if not reached:
                return names
            scopes -= reached
            for scope in reached:
                owner = scope.owner
                names.add(owner.name if owner and scope.name == "__init__" else scope.name)

    def all(self) -> Iterator[list[Event]]:
        waiting = [
            scope
            for scope in self.script.scopes
            if any(call.last_name in self.names for call in self.script.calls_in(scope))
        ]
        while waiting:
            root = next((one for one in waiting if not self._callers_in(one, waiting)), waiting[0])
            self.events = []
            self._walk(root, (), (), {})
            waiting = [scope for scope in waiting if scope not in self.walked]
            if self.events:
                yield self.events

    def _callers_in(self, function: Scope, waiting: list[Scope]) -> bool:
        callers = self.script.callers(function) if function.is_function else []
        return any(call.scope in waiting and call.scope is not function for call in callers)

    def _walk(
        self, scope: Scope, chain: Chain, path: tuple[tuple[Chain, Context], ...], env: Env
    ) -> None:
        self.walked.add(scope)
        for call in sorted(self.script.calls_in(scope), key=lambda call: end(call.node)):
            if len(self.events) > MOST_EVENTS:
                return
            function = self._function(call)
            role = self.role(call) if call.last_name in self.methods and not function else ""
            if not role and function is None:
                continue
            tests = [item for item in call.context if isinstance(item, If)]
            if any(self.script.decide(item, scope, None, env) is False for item in tests):
                continue
            here = (*path, *((chain, item) for item in call.context))
            if role:
                self.events.append(Event(call, role, chain, here))
            elif function is not None and len(chain) < DEEPEST:
                inner = self.script.bind(call, function, 0, env)
                if all(function is not one.function for one in chain):
                    self._walk(function, (*chain, call), here, inner)

    def _function(self, call: Call) -> Scope | None:
        """Return the project function that a call runs, if it is relevant."""
        if call.last_name in self.names:
            return call.function
        if "__call__" in self.names and not call.target and isinstance(call.node.func, ast.Name):
            return called_object(self.script, call)
        return None
