"""Find which ranks reach a call: follow every chain of calls to it, and evaluate the conditions."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.names import ACCELERATOR, DDP, INIT
from paralab.doctor.static.project import Module, Scope
from paralab.doctor.static.script import UNKNOWN, Env, Script, once_per_script

MOST_WAYS = 24
DEEPEST_WAY = 8
# `@rank_zero_only`, `@master_only`, `@run_on_main_process`
_ONE_RANK = re.compile(r"(rank_?(zero|0)|master|main|chief|primary)", re.I)
_RUN_BY_TORCH = ("forward", "__getitem__", "__iter__", "__call__", "__len__")
_RANKS = re.compile(r"rank|nprocs|spawn|device_ids|accelerat", re.I)
_STARTS = re.compile(r"(spawn|launch|start|run|process|elastic|distribut|main|fire)", re.I)


@dataclass(frozen=True)
class Way:
    """One chain of calls to a node, `known` if it begins where the script or a rank starts."""

    calls: tuple[Call, ...]  # in order, from the entry point to the node
    known: bool

    def tests(self) -> Iterator[tuple[If, Scope]]:
        for call in self.calls:
            yield from ((one, call.scope) for one in call.inside(If))


@dataclass(frozen=True)
class Arrival:
    """Whether a rank takes a path, or None if unknown. `doubt` is the first unknown condition."""

    taken: bool | None
    doubt: If | None = None


def ways_to(script: Script, call: Call) -> list[Way]:
    """Return the chains of calls that lead to a call, from each entry point."""
    found: list[Way] = []
    _follow(script, (call,), found)
    return found


def _follow(script: Script, calls: tuple[Call, ...], found: list[Way]) -> None:
    scope: Scope | None = calls[0].scope
    while scope is not None and (scope.is_class or isinstance(scope.node, ast.Lambda)):
        scope = scope.parent
    if len(found) >= MOST_WAYS:
        return
    if scope is None or not scope.is_function:
        found.append(Way(calls, True))
        return
    if script.is_spawned(scope) or is_started(script, scope):
        found.append(Way(calls, True))
    before = [call for call in script.callers(scope) if call not in calls]
    sure = bool(before)
    if not before and scope.owner is not None:
        before = [  # `self.saver.save()` with an unknown saver
            call
            for call in script.methods(scope.name)
            if call.function is None and not call.target and call not in calls
        ] or [call for call in script.methods(scope.owner.name) if call.made is scope.owner]
    if not before or len(calls) > DEEPEST_WAY:
        if not (found and found[-1].calls == calls):
            found.append(Way(calls, False))
        return
    for call in before:
        start = len(found)
        _follow(script, (call, *calls), found)
        if not sure:
            found[start:] = [Way(way.calls, False) for way in found[start:]]


def is_started(script: Script, function: Scope) -> bool:
    """Return whether another call starts the function: `launch(main, args)`, `fire.Fire(main)`."""
    name = function.name
    return any(
        isinstance(one, ast.Name) and one.id == name and script.resolve(one, call.scope) is function
        for call in script.calls_matching(_STARTS)
        for one in call.arguments
    )


def is_run(script: Script, scope: Scope) -> bool:
    """Return whether a chain of calls with known conditions leads from the script to a function."""
    known: dict[Scope, bool] = script.memory.setdefault(is_run, {})
    if scope not in known:
        known[scope] = False  # a cycle adds nothing
        known[scope] = _is_run(script, scope)
    return known[scope]


def _is_run(script: Script, scope: Scope) -> bool:
    if scope.parent is None:
        return True
    if scope.is_class or isinstance(scope.node, ast.Lambda):
        return is_run(script, scope.parent)
    if script.is_spawned(scope) or is_started(script, scope):
        return True
    calls = script.callers(scope)
    if not calls and scope.owner is not None and scope.name in _RUN_BY_TORCH:
        calls = script.callers(script.method(scope.owner, "__init__") or scope.owner)
    return any(
        has_decided_tests(script, call.node, call.scope) and is_run(script, call.scope)
        for call in calls
    )


def has_decided_tests(script: Script, node: ast.AST, scope: Scope) -> bool:
    """Return whether each enclosing condition is true, or uses the rank, a counter, or data."""
    return all(
        script.decide(way, scope, None) is True
        or script.differs(way.test, scope)
        or script.nature(way.test, scope) in ("rank", "local")
        or script.counts(way.test, scope)
        for way in script.context(node, scope.module)
        if isinstance(way, If) and not way.exits
    )


def is_excluded(script: Script, node: ast.AST, module: Module) -> bool:
    """Return whether a condition keeps all ranks of a job from a node."""
    tests = [one for one in script.context(node, module) if isinstance(one, If)]
    return any(script.decide(one, module.scope_of(node), None) is False for one in tests)


def arrives(script: Script, way: Way, rank: int) -> Arrival:
    """Return whether this rank passes all conditions along a chain of calls."""
    env: Env = {}
    doubt: If | None = None
    for call, following in zip(way.calls, (*way.calls[1:], None), strict=True):
        if _is_for_one_rank(call.scope):
            return Arrival(rank == 0)
        for one in call.inside(If):
            taken = script.decide(one, call.scope, rank, env)
            if taken is False:
                return Arrival(False)
            if taken is None and one.exits not in ("raise", "exit"):
                nature = script.nature(one.test, call.scope)
                loops = isinstance(one.node, ast.While) and nature != "rank"
                agreed = loops or (
                    nature == "same" and (bool(one.exits) or script.counts(one.test, call.scope))
                )
                doubt = doubt or (None if agreed else one)
        if following is not None:
            inside = following.scope
            bound = script.bind(call, inside, rank, env) if call.function is inside else {}
            env = {name: value for name, value in bound.items() if value is not UNKNOWN}
    return Arrival(True if doubt is None else None, doubt)


def _is_for_one_rank(scope: Scope) -> bool:
    return any(map(_ONE_RANK.search, scope.decorators))


def guard_of(
    script: Script, call: Call, keeps_out: Callable[[If, Scope], bool], depth: int = 3
) -> tuple[If, Scope] | None:
    """Return the condition (and its scope) that keeps ranks from a call, or from all calls of its
    function."""
    tests = ((one, call.scope) for one in call.inside(If))
    own = next((pair for pair in tests if keeps_out(*pair)), None)
    callers = script.callers(call.scope) if call.scope.is_function and depth else []
    if own is not None or not callers:
        return own
    guards = [guard_of(script, caller, keeps_out, depth - 1) for caller in callers]
    return None if None in guards else guards[0]


def starts_of_job(script: Script) -> list[Way]:
    """Return the chains of calls that make this a multi-rank job."""
    return [
        way
        for call in script.calls_of(INIT, DDP, ACCELERATOR)
        for way in ways_to(script, call)
        if arrives(script, way, 1).taken is not False
    ]


@once_per_script
def has_ranks(script: Script) -> bool:
    """Return whether a machine definitely runs multiple ranks. With `world_size=args.world_size` and
    no mention of ranks, each machine has one process. With `world_size=1`, there is only one."""
    starts = script.calls_of(INIT)
    given = [call.argument(99, "world_size") for call in starts]
    sizes = [(size, call.scope) for size, call in zip(given, starts, strict=True) if size]
    if any(script.evaluate(size, scope, 1) == 1 for size, scope in sizes):
        return False
    by_launcher = not starts or len(sizes) < len(starts)
    return by_launcher or any(_RANKS.search(module.text) for module in script.modules)


def excludes(one: Way, other: Way) -> bool:
    """Return whether two chains of calls need different outcomes of the same condition."""
    taken = {ast.unparse(test.test): test.taken for test, _ in other.tests()}
    return any(
        taken.get(ast.unparse(test.test), test.taken) != test.taken for test, _ in one.tests()
    )
