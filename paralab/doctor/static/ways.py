"""Find which ranks reach a call: every chain of calls that leads there, and its tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.names import ACCELERATOR, DDP, INIT
from paralab.doctor.static.origins import decorators_of
from paralab.doctor.static.project import Scope
from paralab.doctor.static.script import UNKNOWN, Env, Script

MOST_WAYS = 24
DEEPEST_WAY = 8
# `@rank_zero_only`, `@master_only`, `@run_on_main_process`
_ONE_RANK = re.compile(r"(rank_?(zero|0)|master|main|chief|primary)", re.I)
_STARTS = re.compile(r"(spawn|launch|start|run|process|elastic|distribut|main|fire)", re.I)


@dataclass(frozen=True)
class Way:
    """One chain of calls to a node. `known`: it begins where the script or a rank starts."""

    calls: tuple[Call, ...]  # from the entry point to the node
    known: bool

    def tests(self) -> Iterator[tuple[If, Scope]]:
        for call in self.calls:
            yield from ((one, call.scope) for one in call.inside(If))


@dataclass(frozen=True)
class Arrival:
    """Whether a rank takes a path: True, False, or None. `doubt`: the first undecided test."""

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


def arrives(script: Script, way: Way, rank: int) -> Arrival:
    """Return whether this rank passes all tests on the path."""
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
    return any(map(_ONE_RANK.search, decorators_of(scope)))


def starts_of_job(script: Script) -> list[Way]:
    """Return the paths to the calls that make this a multi-rank job."""
    return [
        way
        for call in script.calls_of(INIT, DDP, ACCELERATOR)
        for way in ways_to(script, call)
        if arrives(script, way, 1).taken is not False
    ]


def excludes(one: Way, other: Way) -> bool:
    """Return whether two paths need different outcomes of the same test."""
    taken = {ast.unparse(test.test): test.taken for test, _ in other.tests()}
    return any(
        taken.get(ast.unparse(test.test), test.taken) != test.taken for test, _ in one.tests()
    )
