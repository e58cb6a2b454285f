"""The collectives that each rank calls, in order, and the first place where two ranks differ.

A walk over the script decides every test that depends on the rank and keeps other tests as forks.
It follows calls into project functions:

    rank 0:  [DDP, Repeat[backward, Fork(step % 10 == 0)[all_reduce]], barrier]
    rank 1:  [DDP, Repeat[backward, Fork(step % 10 == 0)[]]]
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from paralab.doctor.static.facts import Call, If, leaves
from paralab.doctor.static.names import (
    COLLECTIVES,
    DDP,
    FRAMEWORK_COLLECTIVES,
    GROUP_POSITION,
    sounds_like,
)
from paralab.doctor.static.project import FUNCTIONS, Scope, dotted_key, position
from paralab.doctor.static.script import Env, Script, once_per_script

MOST_NODES = 4000
DEEPEST = 8


@dataclass(eq=False)
class Guard:
    """A test that only some ranks pass. `sure` is false if another part of it is undecided."""

    node: ast.AST
    test: ast.expr
    scope: Scope
    sure: bool = True


@dataclass(eq=False)
class Meet:
    """A call in which ranks wait for each other. `sure`: it is certainly such a call."""

    call: Call
    op: str
    sure: bool
    guard: Guard | None


@dataclass(eq=False)
class Leave:
    how: str  # return, break, continue, exit, raise
    node: ast.AST
    scope: Scope
    guard: Guard | None


@dataclass(eq=False)
class Fork:
    """A test that the rank does not decide. `nature`: see Script.nature."""

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


@dataclass(frozen=True)
class Difference:
    """The place where two ranks diverge. `more`: what one rank does and the other does not."""

    rank: int  # the rank that does `more`
    more: Meet | Leave
    other: Meet | None  # what the other rank does instead
    sure: bool
    swapped: bool = False  # same operation, other tensor


class Sequences:
    """The trees of rank 0 and rank 1, from each entry point of the script."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def roots(self) -> Iterator[Scope]:
        """Yield the script itself, and its functions that nothing calls."""
        main = self.script.modules[0]
        yield main.scope
        for scope in main.scopes.values():
            if not scope.is_function or isinstance(scope.node, ast.Lambda) or _is_nested(scope):
                continue
            alone = scope.name in self.relevant and not self.script.callers(scope)
            if alone or self.script.is_spawned(scope):
                yield scope

    @cached_property
    def relevant(self) -> set[str]:
        """Names of functions that may call a collective, directly or through others."""
        inside: dict[str, set[str]] = defaultdict(set)
        names = {*COLLECTIVES, *FRAMEWORK_COLLECTIVES, "backward", "DistributedDataParallel"}
        for call in self.script.calls:
            scope: Scope | None = call.scope
            while scope is not None and not scope.is_function:
                scope = scope.parent
            if scope is not None:
                inside[call.last_name].add(scope.name)
                if scope.owner is not None and scope.name in ("__init__", "__call__"):
                    inside[call.last_name].add(scope.owner.name)
        found: set[str] = set()
        waiting = [one for name in names for one in inside[name]]
        waiting += [one.scope.name for one in self.script.calls if self._is_forward(one)]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting.extend(inside[name])
        return found

    def _is_forward(self, call: Call) -> bool:
        return sounds_like(call.method) == "module" or call.method == "module"

    @cached_property
    def trees(self) -> list[tuple[Scope, list[Node], list[Node]]]:
        return list(self._trees())

    def _trees(self) -> Iterator[tuple[Scope, list[Node], list[Node]]]:
        for root in self.roots():
            walks = [_Walk(self, rank) for rank in (0, 1)]
            zero, one = (walk.function(root, ({}, {})) for walk in walks)
            if min(walk.budget for walk in walks) < 0:
                continue  # a walk that was cut short shows false differences
            if _contains_meet(zero) or _contains_meet(one):
                yield root, zero, one

    def differences(self) -> Iterator[Difference]:
        seen = set()
        for root, zero, one in self.trees:
            for found in compare(zero, one):
                if root.is_function and isinstance(found.more, Leave) and found.other is not None:
                    # The code after this function is unknown; the collective itself is extra.
                    sure = found.sure and found.other.sure
                    other = found.other
                    other.guard = other.guard or found.more.guard
                    found = Difference(1 - found.rank, other, None, sure)
                key = found.more.call.node if isinstance(found.more, Meet) else found.more.node
                if key not in seen:
                    seen.add(key)
                    yield found


@once_per_script
def sequences_of(script: Script) -> Sequences:
    return Sequences(script)


@once_per_script
def differences_of(script: Script) -> list[Difference]:
    return list(sequences_of(script).differences())


class _Walk:
    """The walk of one rank through the script."""

    def __init__(self, sequences: Sequences, rank: int) -> None:
        self.sequences, self.script, self.rank = sequences, sequences.script, rank
        self.guards: list[Guard] = []
        self.stack: list[Scope] = []
        self.budget = MOST_NODES

    @property
    def guard(self) -> Guard | None:
        return self.guards[-1] if self.guards else None

    def function(self, scope: Scope, envs: tuple[Env, Env]) -> list[Node]:
        if scope in self.stack or len(self.stack) > DEEPEST or self.budget < 0:
            return []
        self.stack.append(scope)
        guards = len(self.guards)
        node = scope.node
        if isinstance(node, ast.Lambda):
            nodes = list(self.expression(node.body, scope, envs))
        else:
            nodes, _ = self.block(getattr(node, "body", []), scope, envs)
        del self.guards[guards:]
        self.stack.pop()
        return nodes

    def block(
        self, statements: list[ast.stmt], scope: Scope, envs: tuple[Env, Env]
    ) -> tuple[list[Node], str]:
        """Return the nodes of a block, and how it always ends early (or an empty string)."""
        nodes: list[Node] = []
        guards = len(self.guards)
        for number, statement in enumerate(statements):
            self.budget -= 1
            ended = ""
            if isinstance(statement, ast.If):
                more, ended, rest_done = self.choose(
                    statement, statements[number + 1 :], scope, envs
                )
                nodes.extend(more)
                if rest_done:
                    del self.guards[guards:]
                    return nodes, ended
            else:
                more, ended = self.statement(statement, scope, envs)
                nodes.extend(more)
            if ended:
                del self.guards[guards:]
                return nodes, ended
        del self.guards[guards:]
        return nodes, ""

    def choose(
        self, node: ast.If, rest: list[ast.stmt], scope: Scope, envs: tuple[Env, Env]
    ) -> tuple[list[Node], str, bool]:
        """Return an `if` as a single branch if the rank decides it, else as a fork."""
        nodes = list(self.expression(node.test, scope, envs))
        truths = [self.script.truth(node.test, scope, rank, envs[rank]) for rank in (0, 1)]
        own, peer = truths[self.rank], truths[1 - self.rank]
        apart = own != peer
        if own is None and peer is not None:
            own = not peer  # `rank == 0 and step % 10 == 0`: only in some steps
        if own is None:
            more, ended, done = self.fork(node, rest, scope, envs)
            return [*nodes, *more], ended, done
        chosen, left = (node.body, node.orelse) if own else (node.orelse, node.body)
        guard = Guard(node, node.test, scope, None not in truths or self._is_plain(node, scope))
        if apart:
            self.guards.append(guard)
        more, ended = self.block(chosen, scope, envs)
        if apart:
            self.guards.pop()
            if leaves(left) and not ended:
                self.guards.append(guard)  # the rest of the block runs on this rank only
        return [*nodes, *more], ended, False

    def _is_plain(self, node: ast.If, scope: Scope) -> bool:
        """Return whether the rest of a rank test holds on all ranks at some time."""
        parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        return all(
            self.script.nature(part, scope) == "rank" or self.script.counts(part, scope)
            for part in parts
        )

    def fork(
        self, node: ast.If, rest: list[ast.stmt], scope: Scope, envs: tuple[Env, Env]
    ) -> tuple[list[Node], str, bool]:
        then, first = self.block(node.body, scope, envs)
        other, second = self.block(node.orelse, scope, envs)
        if "raise" in (first, second) and first != second:
            # An exception ends the job, so the walk continues in the other branch.
            return (other, second, False) if first == "raise" else (then, first, False)
        done = bool(first) != bool(second)
        ended = first if first and second else ""
        if done:
            following, ended = self.block(rest, scope, envs)
            (other if first else then).extend(following)
        if not then and not other:
            return [], ended, done
        nature = self.script.nature(node.test, scope)
        if nature == "rank" and not self._compares_rank(node.test, scope):
            nature = "unknown"
        if nature == "same" and not self.script.comes_true(node.test, scope):
            nature = "unknown"
        return [Fork(node, node.test, scope, nature, then, other)], ended, done

    def _compares_rank(self, test: ast.expr, scope: Scope) -> bool:
        """Return whether a test compares the rank with an unknown value: `rank == args.chief`."""
        sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else []
        return any(
            [self.script.evaluate(side, scope, rank) for rank in (0, 1)] == [0, 1] for side in sides
        )

    def statement(
        self, node: ast.stmt, scope: Scope, envs: tuple[Env, Env]
    ) -> tuple[list[Node], str]:
        nodes: list[Node] = []
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return [], ""
            case ast.For() | ast.AsyncFor():
                nodes += self.expression(node.iter, scope, envs)
                body, _ = self.block(node.body, scope, envs)
                rest, ended = self.block(node.orelse, scope, envs)
                return [*nodes, Repeat(node, body), *rest], ended
            case ast.While():
                nodes += self.expression(node.test, scope, envs)
                body, _ = self.block(node.body, scope, envs)
                return [*nodes, Repeat(node, body)], ""
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    nodes += self.expression(item.context_expr, scope, envs)
                body, ended = self.block(node.body, scope, envs)
                return [*nodes, *body], ended
            case ast.Try():
                body, ended = self.block([*node.body, *node.orelse], scope, envs)
                rest, later = self.block(node.finalbody, scope, envs)
                return [*nodes, *body, *rest], later or ended
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                nodes += self.expression(child, scope, envs)
        how = leaves([node])
        if how:
            if how in ("exit", "raise"):
                how = "raise" if _fails(node) else "exit"
            nodes.append(Leave(how, node, scope, self.guard))
        return nodes, how

    def expression(self, node: ast.expr, scope: Scope, envs: tuple[Env, Env]) -> Iterator[Node]:
        """Yield the calls in an expression, inner calls first."""
        outer = len(self.script.context(node, scope.module))
        for call in self.script.calls_within(node, scope):
            ways = [way for way in call.context[outer:] if isinstance(way, If)]
            truths = [self.script.decide(way, scope, self.rank, envs[self.rank]) for way in ways]
            if False in truths:
                continue
            nodes = list(self.call(call, envs))
            if nodes and None in truths:
                way = ways[truths.index(None)]
                nature = self.script.nature(way.test, scope)
                nodes = [Fork(way.node, way.test, scope, nature, nodes)]
            elif nodes:
                for way in ways:
                    if self.script.differs(way.test, scope, envs):
                        for meet in all_meets(nodes):
                            meet.guard = meet.guard or Guard(way.node, way.test, scope)
            yield from nodes

    def call(self, call: Call, envs: tuple[Env, Env]) -> Iterator[Node]:
        meet = meets_in(self.script, call)
        if meet is not None:
            op, sure = meet
            yield Meet(call, op, sure, self.guard)
            return
        function = None
        if call.last_name in self.sequences.relevant:
            function = call.function
        if function is None and "__call__" in self.sequences.relevant and not call.target:
            function = self._called_object(call)
        if function is None:
            return
        inner = tuple(self.script.bind(call, function, rank, envs[rank]) for rank in (0, 1))
        wrapped = self._decorated(function, call, envs)
        body = wrapped if wrapped is not None else self.function(function, (inner[0], inner[1]))
        decorators = getattr(function.node, "decorator_list", [])
        if any("cache" in ast.unparse(one) for one in decorators):
            for one in all_meets(body):
                one.sure = False  # a second call with the same arguments does nothing
        if body:
            yield Inline(call, body)

    def _called_object(self, call: Call) -> Scope | None:
        """Return the `__call__` that `callback(trainer)` runs."""
        for maker in self.script.makers(call.node.func, call.scope):
            if maker.made is not None:
                return self.script.method(maker.made, "__call__")
        return None

    def _decorated(self, function: Scope, call: Call, envs: tuple[Env, Env]) -> list[Node] | None:
        """Return a function's nodes under `@rank_zero_only` or a similar decorator, or None."""
        for decorator in getattr(function.node, "decorator_list", []):
            name = (dotted_key(decorator) or "").rpartition(".")[2]
            guard = Guard(decorator, decorator, function.parent or function)
            if name in ("rank_zero_only", "main_process_only", "master_only", "on_main_process"):
                return self._on_main(function, guard)
            found = self.script.resolve(decorator, function.parent or function)
            if isinstance(found, Scope) and found.is_function:
                inner = [one for one in found.module.scopes.values() if one.parent is found]
                for wrapper in inner:
                    body = self._wrapper(wrapper, found, function)
                    if body is not None:
                        return body
        return None

    def _wrapper(self, wrapper: Scope, decorator: Scope, function: Scope) -> list[Node] | None:
        """Return the wrapped function's nodes if only some ranks call it, or None."""
        names = [one.arg for one in decorator.parameters]
        for call in self.script.calls_in(wrapper):
            if isinstance(call.node.func, ast.Name) and call.node.func.id in names[:1]:
                for way in call.inside(If):
                    truths = [self.script.truth(way.test, wrapper, rank) for rank in (0, 1)]
                    if set(truths) == {True, False}:
                        guard = Guard(way.node, way.test, wrapper)
                        if truths[self.rank] == way.taken:
                            return self._under(function, guard)
                        return []
        return None

    def _on_main(self, function: Scope, guard: Guard) -> list[Node]:
        return self._under(function, guard) if self.rank == 0 else []

    def _under(self, function: Scope, guard: Guard) -> list[Node]:
        self.guards.append(guard)
        nodes = self.function(function, ({}, {}))
        self.guards.pop()
        return nodes


def meets_in(script: Script, call: Call) -> tuple[str, bool] | None:
    """Return the collective that a call runs, and whether that is certain."""
    name = call.target.rpartition(".")[2] if call.target.startswith("torch.distributed.") else ""
    if call.target == f"torch.distributed.{name}" and name in COLLECTIVES:
        group = call.argument(GROUP_POSITION.get(name, 99), "group")
        if group is None or (isinstance(group, ast.Constant) and group.value is None):
            return None if call.unpacks else (name, True)
        made = [one for one in script.makers(group, call.scope) if one.method == "new_group"]
        return None if made else (f"{name} in {ast.unparse(group)}", False)
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
    return None


def passes_ddp(script: Script, node: ast.expr | None, scope: Scope, depth: int = 0) -> bool:
    """Return whether the forward pass of a DDP model computed a value."""
    if node is None or depth > 8:
        return False
    return any(
        script.is_kind(call.node.func, call.scope, "ddp")
        for call in script.contributors(node, scope)
    )


# --- comparing


def compare(
    zero: list[Node],
    one: list[Node],
    sure: bool = True,
    after: tuple[list[Node], list[Node]] = ([], []),
    outer: tuple[set[str], set[str]] = (set(), set()),
) -> Iterator[Difference]:
    """Yield where rank 0 and rank 1 diverge, in program order. `after`: what follows outside."""
    lists = [list(zero), list(one)]
    own = [{meet.op for meet in all_meets(part) if meet.guard} for part in lists]
    answers = (own[0] | outer[0], own[1] | outer[1])
    while lists[0] or lists[1]:
        x, y = (part[0] if part else None for part in lists)
        following = (lists[0][1:] + after[0], lists[1][1:] + after[1])
        if x is not None and y is not None and _key(x) == _key(y):
            yield from _inside(x, y, sure, following, answers)
            if isinstance(x, Leave):
                return
            del lists[0][0], lists[1][0]
            continue
        rank = _next_extra(lists)
        if rank is None:  # both calls come later on the other rank: the order differs
            if isinstance(x, Meet) and isinstance(y, Meet):
                yield Difference(0, x, y, _is_sure(x, sure) and y.sure)
            return
        node = lists[rank].pop(0)
        if isinstance(node, Inline):
            lists[rank][:0] = [one for one in node.body if not isinstance(one, Leave)]
        elif isinstance(node, Leave):
            if node.how == "raise":
                return  # an exception on any rank ends the job
            if node.guard is not None:
                yield from _leaves(rank, node, lists, sure, after)
                return
        elif not _is_silent(node):
            peer = lists[1 - rank][0] if lists[1 - rank] else None
            other = peer if isinstance(peer, Meet) else None
            for meet in all_meets([node]):
                if meet.op in answers[1 - rank]:
                    continue  # a leader and its followers, each in its own branch
                certain = _is_sure(meet, sure) and not _under_fork(node, meet)
                yield Difference(rank, meet, other, certain)
                other = None


def _next_extra(lists: list[list[Node]]) -> int | None:
    """Return the rank whose next node the other lacks; a rank that leaves has priority."""
    there = [rank for rank in (0, 1) if lists[rank]]
    missing = [
        rank
        for rank in there
        if not any(_key(lists[rank][0]) == _key(one) for one in lists[1 - rank])
    ]
    for kinds in ((Leave,), (Inline,), (Meet, Fork, Repeat)):
        for rank in there:
            node = lists[rank][0]
            if isinstance(node, kinds) and (rank in missing or isinstance(node, Leave)):
                return rank
    return next((rank for rank in there if _is_silent(lists[rank][0])), None)


def _leaves(
    rank: int,
    node: Leave,
    lists: list[list[Node]],
    sure: bool,
    after: tuple[list[Node], list[Node]],
) -> Iterator[Difference]:
    """Yield the differences after one rank leaves: the other rank's collectives are extra."""
    assert node.guard is not None
    sure = sure and node.guard.sure
    skipped = list(all_meets(lists[1 - rank]))
    goes_on = next(all_meets(after[rank]), None) is not None
    if node.how in ("return", "continue") and goes_on:
        yield from (Difference(1 - rank, meet, None, _is_sure(meet, sure)) for meet in skipped)
    else:
        following = next(iter([*skipped, *all_meets(after[1 - rank])]), None)
        if following is not None:
            yield Difference(rank, node, following, sure)


def _inside(
    x: Node,
    y: Node,
    sure: bool,
    after: tuple[list[Node], list[Node]],
    answers: tuple[set[str], set[str]],
) -> Iterator[Difference]:
    match x, y:
        case Meet(), Meet():
            if _is_swapped(x, y, after):
                yield Difference(0, x, y, _is_sure(x, sure), swapped=True)
        case Fork(), Fork():
            if x.nature == "rank":
                yield from _undecided(x)
                return
            decided = sure and x.nature in ("same", "local")
            yield from compare(x.then, y.then, decided, after, answers)
            yield from compare(x.other, y.other, decided, after, answers)
        case Repeat(), Repeat():
            again = (x.body + after[0], y.body + after[1])
            yield from compare(x.body, y.body, sure, again, answers)
        case Inline(), Inline():
            yield from compare(x.body, y.body, sure, after, answers)


def _undecided(fork: Fork) -> Iterator[Difference]:
    """Yield collectives under `if rank == args.chief`, which some unknown ranks enter."""
    for mine, theirs in ((fork.then, fork.other), (fork.other, fork.then)):
        known = {meet.op for meet in all_meets(theirs)}
        for meet in all_meets(mine):
            if meet.op not in known:
                meet.guard = meet.guard or Guard(fork.node, fork.test, fork.scope, False)
                yield Difference(0, meet, None, False)


def _is_swapped(x: Meet, y: Meet, after: tuple[list[Node], list[Node]]) -> bool:
    """Return whether one rank runs `all_reduce(loss); all_reduce(accuracy)` in reverse order."""
    mine, theirs = _subject(x), _subject(y)
    if not mine or not theirs or mine == theirs or x.guard is None or y.guard is None:
        return False
    later = [{(one.op, _subject(one)) for one in all_meets(part)} for part in after]
    return (x.op, theirs) in later[0] and (x.op, mine) in later[1]


def _subject(meet: Meet) -> str | None:
    return dotted_key(meet.call.node.args[0]) if meet.call.node.args else None


def _is_sure(meet: Meet, sure: bool) -> bool:
    return sure and meet.sure and meet.guard is not None and meet.guard.sure


def _under_fork(node: Node, meet: Meet) -> bool:
    """Return whether a meet is under a test that nothing here decides."""
    match node:
        case Fork():
            return node.nature not in ("same",) and any(one is meet for one in all_meets([node]))
        case Repeat() | Inline():
            return any(_under_fork(one, meet) for one in node.body)
    return False


def _key(node: Node) -> object:
    match node:
        case Meet():
            return node.op
        case Leave():
            return "leave", node.how
        case Fork() | Repeat():
            return node.node
        case Inline():
            return node.call.node


def _is_silent(node: Node) -> bool:
    """Return whether a node contains nothing that another rank could wait for."""
    match node:
        case Meet():
            return False
        case Leave():
            return node.guard is None
        case Fork() | Repeat() | Inline():
            return not _contains_meet([node])


def all_meets(nodes: list[Node]) -> Iterator[Meet]:
    for node in nodes:
        match node:
            case Meet():
                yield node
            case Fork():
                yield from all_meets(node.then)
                yield from all_meets(node.other)
            case Repeat() | Inline():
                yield from all_meets(node.body)


def _contains_meet(nodes: list[Node]) -> bool:
    return next(all_meets(nodes), None) is not None


def _is_nested(scope: Scope) -> bool:
    parent = scope.parent
    return parent is not None and isinstance(parent.node, FUNCTIONS)


def _fails(node: ast.stmt) -> bool:
    """Return whether a call is `sys.exit(1)`, after which the launcher ends the job."""
    call = node.value if isinstance(node, ast.Expr) else getattr(node, "exc", None)
    if isinstance(node, ast.Raise) and (
        call is None or dotted_key(getattr(call, "func", call)) != "SystemExit"
    ):
        return True
    if isinstance(call, ast.Call) and call.args:
        value = call.args[0]
        return not (isinstance(value, ast.Constant) and value.value in (0, None))
    return False


__all__ = [
    "Difference",
    "Fork",
    "Inline",
    "Leave",
    "Meet",
    "Repeat",
    "Sequences",
    "all_meets",
    "compare",
    "position",
]
