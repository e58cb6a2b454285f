"""The first places where two ranks differ in the collectives they call."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.collective_tree import (
    Fork,
    Guard,
    Inline,
    Leave,
    Meet,
    Node,
    Nodes,
    Repeat,
    Walk,
    all_meets,
)
from paralab.doctor.static.context import EXITS
from paralab.doctor.static.names import (
    COLLECTIVES,
    FRAMEWORK_COLLECTIVES,
    GATHERS,
    SHARDS,
    sounds_like,
)
from paralab.doctor.static.project import FUNCTIONS, Scope
from paralab.doctor.static.script import Script, once_per_script

Pair = tuple[Nodes, Nodes]  # the nodes of rank 0 and of rank 1


@dataclass(frozen=True)
class Difference:
    """The place where two ranks diverge. Only one of them does `more`."""

    rank: int  # the rank that does `more`
    more: Meet | Leave
    other: Meet | None  # what the other rank does instead
    sure: bool
    swapped: bool = False  # both ranks run the same operation on different tensors


@once_per_script
def differences_of(script: Script) -> list[Difference]:
    found: dict[ast.AST, Difference] = {}
    for root, zero, one in trees_of(script):
        for difference in compare(zero, one):
            more, other = difference.more, difference.other
            if root.is_function and isinstance(more, Leave) and other is not None:
                # The code after this function is unknown, so report the collective as extra.
                other.guard = other.guard or more.guard
                sure = difference.sure and other.sure
                difference = Difference(1 - difference.rank, other, None, sure)
                more = other
            found.setdefault(more.call.node if isinstance(more, Meet) else more.node, difference)
    return list(found.values())


@once_per_script
def trees_of(script: Script) -> list[tuple[Scope, Nodes, Nodes]]:
    """Return the trees of rank 0 and rank 1 from each entry point of the script."""
    found, relevant = [], _relevant_names(script)
    for root in _roots(script, relevant):
        walks = [Walk(script, relevant, rank) for rank in (0, 1)]
        zero, one = (walk.function(root) for walk in walks)
        # An incomplete walk would show false differences.
        is_whole = min(walk.budget for walk in walks) >= 0
        if is_whole and (_contains_meet(zero) or _contains_meet(one)):
            found.append((root, zero, one))
    return found


def _roots(script: Script, relevant: set[str]) -> Iterator[Scope]:
    """Yield the script itself, and its functions that nothing calls."""
    main = script.modules[0]
    yield main.scope
    for scope in main.scopes.values():
        is_nested = scope.parent is not None and isinstance(scope.parent.node, FUNCTIONS)
        if not scope.is_function or isinstance(scope.node, ast.Lambda) or is_nested:
            continue
        alone = scope.name in relevant and not script.callers(scope)
        if alone or script.is_spawned(scope):
            yield scope


def _relevant_names(script: Script) -> set[str]:
    """Return the names of functions that may call a collective or exit, directly or through
    others."""
    inside: dict[str, set[str]] = defaultdict(set)
    names = {*COLLECTIVES, *FRAMEWORK_COLLECTIVES, "backward", "DistributedDataParallel"}
    names |= {name.rpartition(".")[2] for name in EXITS}
    names |= GATHERS if script.methods(*SHARDS) else set()
    found: set[str] = set()
    waiting: list[str] = []
    for call in script.calls:
        scope: Scope | None = call.scope
        while scope is not None and not scope.is_function:
            scope = scope.parent
        if scope is not None:
            inside[call.last_name].add(scope.name)
            if scope.owner is not None and scope.name in ("__init__", "__call__"):
                inside[call.last_name].add(scope.owner.name)
        if sounds_like(call.method) == "module" or call.method == "module":  # runs a forward
            waiting.append(call.scope.name)
    waiting += [one for name in names for one in inside[name]]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(inside[name])
    return found


def compare(
    zero: Nodes,
    one: Nodes,
    sure: bool = True,
    after: Pair = ([], []),
    outer: tuple[set[str], set[str]] = (set(), set()),
) -> Iterator[Difference]:
    """Yield where rank 0 and rank 1 diverge, in program order. `after` holds the nodes that follow
    `zero` and `one`."""
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
        if rank is None:  # each call comes later on the other rank
            if isinstance(x, Meet) and isinstance(y, Meet):
                yield Difference(0, x, y, _is_sure(x, sure) and y.sure)
            return
        node = lists[rank].pop(0)
        if isinstance(node, Inline):
            stays = [one for one in node.body if not isinstance(one, Leave) or one.how == "exit"]
            lists[rank][:0] = stays  # a return only leaves the function
        elif isinstance(node, Leave):
            if node.how == "raise":
                return  # an exception on any rank kills the job
            if node.guard is not None:
                yield from _leaves(rank, node, lists, sure, after)
                return
        elif not _is_silent(node):
            peer = lists[1 - rank][0] if lists[1 - rank] else None
            other = peer if isinstance(peer, Meet) else None
            for meet in all_meets([node]):
                if meet.op in answers[1 - rank]:
                    continue  # the other rank calls it in another branch
                certain = _is_sure(meet, sure) and not _under_fork(node, meet)
                yield Difference(rank, meet, other, certain)
                other = None


def _next_extra(lists: list[Nodes]) -> int | None:
    """Return the rank whose next node the other rank lacks. A rank that leaves has priority."""
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
    rank: int, node: Leave, lists: list[Nodes], sure: bool, after: Pair
) -> Iterator[Difference]:
    """Yield the differences after one rank leaves: the other rank's collectives are extra."""
    assert node.guard is not None
    sure = sure and node.guard.sure
    skipped = list(all_meets(lists[1 - rank]))
    if node.how in ("return", "continue") and _contains_meet(after[rank]):
        yield from (Difference(1 - rank, meet, None, _is_sure(meet, sure)) for meet in skipped)
    else:
        following = next(iter([*skipped, *all_meets(after[1 - rank])]), None)
        if following is not None:
            yield Difference(rank, node, following, sure)


def _inside(
    x: Node, y: Node, sure: bool, after: Pair, answers: tuple[set[str], set[str]]
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
    """Yield collectives under `if rank == args.chief`, which only some (unknown) ranks enter."""
    for mine, theirs in ((fork.then, fork.other), (fork.other, fork.then)):
        known = {meet.op for meet in all_meets(theirs)}
        for meet in all_meets(mine):
            if meet.op not in known:
                meet.guard = meet.guard or Guard(fork.node, fork.test, fork.scope, False)
                yield Difference(0, meet, None, False)


def _is_swapped(x: Meet, y: Meet, after: Pair) -> bool:
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
    """Return whether a collective is under a condition on which the ranks may disagree."""
    match node:
        case Fork():
            return node.nature != "same" and any(one is meet for one in all_meets([node]))
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
    """Return whether a node contains no call that another rank could wait for."""
    return node.guard is None if isinstance(node, Leave) else not _contains_meet([node])


def _contains_meet(nodes: Nodes) -> bool:
    return next(all_meets(nodes), None) is not None
