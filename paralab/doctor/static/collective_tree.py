"""The collectives that one rank calls, as a tree of loops, unknown conditions, and functions.

A walk over the script evaluates its conditions and keeps those with an unknown result as forks. It
follows calls into project functions:

    rank 0:  [DDP, Repeat[backward, Fork(step % 10 == 0)[all_reduce]], barrier]
    rank 1:  [DDP, Repeat[backward, Fork(step % 10 == 0)[]]]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.context import If, leaves
from paralab.doctor.static.facts import Call
from paralab.doctor.static.names import (
    COLLECTIVES,
    DDP,
    FRAMEWORK_COLLECTIVES,
    GATHERS,
    GROUP_POSITION,
    SHARDS,
)
from paralab.doctor.static.project import Scope
from paralab.doctor.static.script import Env, Script

MOST_NODES = 4000
DEEPEST = 8
ON_MAIN = {"rank_zero_only", "main_process_only", "master_only", "on_main_process"}


_NEVER_WAIT = {"torch", "numpy", "torchvision", *sys.stdlib_module_names}
_PLAIN_METHODS = frozenset(
    "print info warning debug error log write flush close append extend update item format join "
    "keys values items get add add_scalar set_description state_dict size numel mean sum".split()
)


@dataclass(eq=False)
class Guard:
    """A condition that is true on only some ranks. `sure` is false if a part of it is unknown."""

    node: ast.AST
    test: ast.expr
    scope: Scope
    sure: bool = True


@dataclass(eq=False)
class Meet:
    """A call in which ranks wait for each other. `sure` is false if it may not be such a call."""

    call: Call
    op: str
    sure: bool
    guard: Guard | None


@dataclass(eq=False)
class Leave:
    how: str  # one of return, break, continue, exit, raise
    node: ast.AST
    scope: Scope
    guard: Guard | None


@dataclass(eq=False)
class Fork:
    """A condition whose result is unknown. `nature` is what Script.nature returns for it."""

    node: ast.AST
    test: ast.expr
    scope: Scope
    nature: str
    then: list[Node] = field(default_factory=list)
    other: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class Repeat:
    node: ast.AST
    body: list[Node]


@dataclass(eq=False)
class Inline:
    """A project function that the script calls here."""

    call: Call
    body: list[Node]


Node = Meet | Leave | Fork | Repeat | Inline
Nodes = list[Node]
Ended = tuple[Nodes, str]  # the nodes, and how the block ends early ("" unless it always does)


def all_meets(nodes: Nodes) -> Iterator[Meet]:
    for node in nodes:
        match node:
            case Meet():
                yield node
            case Fork():
                yield from all_meets([*node.then, *node.other])
            case Repeat() | Inline():
                yield from all_meets(node.body)


class Walk:
    """One rank's walk through the script. `relevant` names functions that may call a collective."""

    def __init__(self, script: Script, relevant: set[str], rank: int) -> None:
        self.script, self.relevant, self.rank = script, relevant, rank
        self.guards: list[Guard] = []
        self.stack: list[Scope] = []
        self.envs: tuple[Env, Env] = ({}, {})  # parameter values on each rank
        self.budget = MOST_NODES

    @property
    def scope(self) -> Scope:
        return self.stack[-1]

    @property
    def guard(self) -> Guard | None:
        return self.guards[-1] if self.guards else None

    def function(self, scope: Scope, envs: tuple[Env, Env] = ({}, {})) -> Nodes:
        if scope in self.stack or len(self.stack) > DEEPEST or self.budget < 0:
            return []
        self.stack.append(scope)
        outside, self.envs = self.envs, envs
        if isinstance(scope.node, ast.Lambda):
            nodes = list(self._expression(scope.node.body))
        else:
            nodes, _ = self._block(getattr(scope.node, "body", []))
        self.envs = outside
        self.stack.pop()
        return nodes

    def _block(self, statements: list[ast.stmt]) -> Ended:
        nodes: Nodes = []
        guards, ended, rest_done = len(self.guards), "", False
        for number, statement in enumerate(statements):
            self.budget -= 1
            if isinstance(statement, ast.If):
                more, ended, rest_done = self._choose(statement, statements[number + 1 :])
            else:
                more, ended = self._statement(statement)
            nodes.extend(more)
            if ended or rest_done:
                break
        del self.guards[guards:]
        return nodes, ended

    def _truths(self, test: ast.expr) -> list[bool | None]:
        return [self.script.truth(test, self.scope, rank, self.envs[rank]) for rank in (0, 1)]

    def _choose(self, node: ast.If, rest: list[ast.stmt]) -> tuple[Nodes, str, bool]:
        """Return one branch of an `if` whose condition is known on this rank, or else a fork. The
        last value is True if the nodes include the rest of the block."""
        nodes = list(self._expression(node.test))
        truths = self._truths(node.test)
        own, peer = truths[self.rank], truths[1 - self.rank]
        apart = own != peer
        if own is None and peer is not None:
            own = not peer  # `rank == 0 and step % 10 == 0`: assume a step where the ranks differ
        if own is None:
            more, ended, done = self._fork(node, rest)
            return [*nodes, *more], ended, done
        chosen, left = (node.body, node.orelse) if own else (node.orelse, node.body)
        sure = None not in truths or self._is_plain(node)
        alone = [*left, *chosen] if leaves(chosen) else left
        sure = sure and not (apart and _may_wait(self.script, alone, self.scope))
        guard = Guard(node, node.test, self.scope, sure)
        if apart:
            self.guards.append(guard)
        more, ended = self._block(chosen)
        if apart:
            self.guards.pop()
            if leaves(left) and not ended:
                self.guards.append(guard)  # only this rank runs the rest of the block
        return [*nodes, *more], ended, False

    def _is_plain(self, node: ast.If) -> bool:
        """Return whether the parts that do not use the rank become true at some point."""
        parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        return all(
            self.script.nature(part, self.scope) == "rank" or self.script.counts(part, self.scope)
            for part in parts
        )

    def _fork(self, node: ast.If, rest: list[ast.stmt]) -> tuple[Nodes, str, bool]:
        then, first = self._block(node.body)
        other, second = self._block(node.orelse)
        if "raise" in (first, second) and first != second:
            # An exception kills the job, so the walk continues in the other branch.
            return (other, second, False) if first == "raise" else (then, first, False)
        done = bool(first) != bool(second)
        ended = first if first and second else ""
        if done:
            following, ended = self._block(rest)
            (other if first else then).extend(following)
        if not then and not other:
            return [], ended, done
        nature = self.script.nature(node.test, self.scope)
        if nature == "rank" and not self._compares_rank(node.test):
            nature = "unknown"
        if nature == "same" and not self.script.comes_true(node.test, self.scope):
            nature = "unknown"
        return [Fork(node, node.test, self.scope, nature, then, other)], ended, done

    def _compares_rank(self, test: ast.expr) -> bool:
        """Return whether a condition is like `rank == args.chief`, with an unknown value."""
        sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else []
        return any(
            [self.script.evaluate(side, self.scope, rank) for rank in (0, 1)] == [0, 1]
            for side in sides
        )

    def _statement(self, node: ast.stmt) -> Ended:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return [], ""
            case ast.For() | ast.AsyncFor() | ast.While():
                head = node.test if isinstance(node, ast.While) else node.iter
                nodes = list(self._expression(head))
                body, _ = self._block(node.body)
                rest, ended = ([], "") if isinstance(node, ast.While) else self._block(node.orelse)
                return [*nodes, Repeat(node, body), *rest], ended
            case ast.With() | ast.AsyncWith():
                heads = [one for item in node.items for one in self._expression(item.context_expr)]
                body, ended = self._block(node.body)
                return [*heads, *body], ended
            case ast.Try():
                body, ended = self._block([*node.body, *node.orelse])
                rest, later = self._block(node.finalbody)
                return [*body, *rest], later or ended
        parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        nodes = [one for part in parts for one in self._expression(part)]
        how = leaves([node])
        if how in ("exit", "raise"):
            how = "raise" if _fails(node) else "exit"
        return [*nodes, Leave(how, node, self.scope, self.guard)] if how else nodes, how

    def _expression(self, node: ast.expr) -> Iterator[Node]:
        """Yield the calls in an expression, inner calls first."""
        scope, env = self.scope, self.envs[self.rank]
        outer = len(self.script.context(node, scope.module))
        for call in self.script.calls_within(node, scope):
            ways = [way for way in call.context[outer:] if isinstance(way, If)]
            truths = [self.script.decide(way, scope, self.rank, env) for way in ways]
            if False in truths:
                continue
            nodes = list(self._call(call))
            if nodes and None in truths:
                way = ways[truths.index(None)]
                nature = self.script.nature(way.test, scope)
                nodes = [Fork(way.node, way.test, scope, nature, nodes)]
            for way in ways if None not in truths else ():
                if self.script.differs(way.test, scope, self.envs):
                    for meet in all_meets(nodes):
                        meet.guard = meet.guard or Guard(way.node, way.test, scope)
            yield from nodes

    def _call(self, call: Call) -> Iterator[Node]:
        meet = meets_in(self.script, call)
        if meet is not None:
            yield Meet(call, *meet, self.guard)
            return
        function = call.function if call.last_name in self.relevant else None
        if function is None and "__call__" in self.relevant and not call.target:
            function = called_object(self.script, call)
        if function is None:
            return
        zero, one = (self.script.bind(call, function, rank, self.envs[rank]) for rank in (0, 1))
        body = self._decorated(function)
        if body is None:
            body = self.function(function, (zero, one))
        if any("cache" in name for name in function.decorators):
            for inner in all_meets(body):
                inner.sure = False  # a second call with the same arguments has no effect
        if body:
            yield Inline(call, body)

    def _decorated(self, function: Scope) -> Nodes | None:
        """Return a function's nodes under `@rank_zero_only` or a similar decorator, or None."""
        outside = function.parent or function
        decorators = getattr(function.node, "decorator_list", [])
        for decorator, name in zip(decorators, function.decorators, strict=True):
            if name in ON_MAIN:
                return self._under(function, Guard(decorator, decorator, outside), self.rank == 0)
            found = self.script.resolve(decorator, outside)
            if isinstance(found, Scope) and found.is_function:
                for wrapper in found.module.scopes.values():
                    body = self._wrapper(wrapper, function) if wrapper.parent is found else None
                    if body is not None:
                        return body
        return None

    def _wrapper(self, wrapper: Scope, function: Scope) -> Nodes | None:
        """Return the wrapped function's nodes if only some ranks call it, or None."""
        assert wrapper.parent is not None
        first = [one.arg for one in wrapper.parent.parameters[:1]]
        for call in self.script.calls_in(wrapper):
            if isinstance(call.node.func, ast.Name) and call.node.func.id in first:
                for way in call.inside(If):
                    if self.script.differs(way.test, wrapper):
                        runs = self.script.decide(way, wrapper, self.rank) is True
                        return self._under(function, Guard(way.node, way.test, wrapper), runs)
        return None

    def _under(self, function: Scope, guard: Guard, runs: bool) -> Nodes:
        self.guards.append(guard)
        nodes = self.function(function) if runs else []
        self.guards.pop()
        return nodes


def called_object(script: Script, call: Call) -> Scope | None:
    """Return the `__call__` that `callback(trainer)` runs."""
    for maker in script.makers(call.node.func, call.scope):
        if maker.made is not None:
            return script.method(maker.made, "__call__")
    return None


def meets_in(script: Script, call: Call) -> tuple[str, bool] | None:
    """Return the collective that a call runs, and whether that is certain."""
    name = call.target.rpartition(".")[2] if call.target.startswith("torch.distributed.") else ""
    if call.target == f"torch.distributed.{name}" and name in COLLECTIVES:
        group = call.argument(GROUP_POSITION.get(name, 99), "group")
        if group is None or (isinstance(group, ast.Constant) and group.value is None):
            return None if call.unpacks else (name, True)
        made = [one for one in script.makers(group, call.scope) if one.method == "new_group"]
        own = made or script.nature(group, call.scope) == "rank"  # `groups[rank // 2]`
        return None if own else (f"{name} in {ast.unparse(group)}", False)
    if call.target == DDP:
        return "DDP", True
    if call.method in FRAMEWORK_COLLECTIVES and script.is_kind(
        call.receiver, call.scope, "accelerator"
    ):
        return call.method, True
    if call.method == "backward" and not call.function:
        loss = call.receiver if call.receiver is not None else call.argument(0, "loss")
        if call.node.args and script.is_kind(call.receiver, call.scope, "accelerator"):
            loss = call.node.args[0]
        return ("backward", True) if passes_ddp(script, loss, call.scope) else None
    if script.is_kind(call.node.func, call.scope, "ddp") and not call.made:
        return "forward", False
    if call.method in GATHERS and script.methods(*SHARDS):
        sharded = call.method != "state_dict" or script.is_kind(call.receiver, call.scope, "fsdp")
        return (call.method, False) if sharded else None
    return None


def passes_ddp(script: Script, node: ast.expr | None, scope: Scope) -> bool:
    """Return whether a value comes from the forward pass of a DDP model."""
    calls = script.contributors(node, scope) if node is not None else []
    return any(script.is_kind(call.node.func, call.scope, "ddp") for call in calls)


def _may_wait(script: Script, block: list[ast.stmt], scope: Scope) -> bool:
    """Return whether a call in a block is unknown, so that it may contain the collective that the
    other ranks wait for: `engine.serve()`."""
    return any(
        call.function is None
        and not call.target.startswith("builtins.")
        and call.target.partition(".")[0] not in _NEVER_WAIT
        and call.method not in _PLAIN_METHODS
        and meets_in(script, call) is None
        for statement in block
        for node in ast.walk(statement)
        if (call := script.call_at.get(node)) is not None and call.scope is scope
    )


def _fails(node: ast.stmt) -> bool:
    """Return whether a statement makes the process fail (`sys.exit(1)`) and thus the whole job."""
    call = node.value if isinstance(node, ast.Expr) else getattr(node, "exc", None)
    if isinstance(node, ast.Raise) and (
        call is None or dotted_key(getattr(call, "func", call)) != "SystemExit"
    ):
        return True
    if isinstance(call, ast.Call) and call.args:
        value = call.args[0]
        return not (isinstance(value, ast.Constant) and value.value in (0, None))
    return False
