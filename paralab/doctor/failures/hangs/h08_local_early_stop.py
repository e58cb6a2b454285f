"""H08: Each rank decides on its own when to stop.

Symptom: One rank leaves the loop. The others time out one step later.
Cause: Every rank compares the loss of its own batches, so the ranks decide differently.
Fix: All-reduce the metric, or broadcast rank 0's decision, before any rank stops.
Reported: Lightning-AI/pytorch-lightning#379 #3381 speechbrain/speechbrain#2051

- if loss.item() < 0.01:
+ total = loss.detach().clone()
+ dist.all_reduce(total)
+ if total.item() / dist.get_world_size() < 0.01:
      break
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from paralab.doctor.failures.hangs.sequences import differences_of, trees_of
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.collective_tree import (
    Fork,
    Inline,
    Leave,
    Meet,
    Node,
    Repeat,
    all_meets,
)
from paralab.doctor.static.facts import Call, If, Loop
from paralab.doctor.static.hints import is_for_one_rank, is_in_training
from paralab.doctor.static.names import COLLECTIVES, DDP, LOADER
from paralab.doctor.static.project import Scope
from paralab.doctor.static.report import Place, at, code, found, line_of
from paralab.doctor.static.script import Script

ENTRY = describe(__doc__)

PATIENCE = re.compile(r"patience|early.?stop|stop.?early|should.?stop", re.IGNORECASE)
CLOCKS = ("time.time", "time.perf_counter", "time.monotonic")


@dataclass(frozen=True)
class Way:
    """The enclosing loops of a node in its function, and whether every enclosing condition is
    known."""

    loops: tuple[Repeat, ...] = ()
    sure: bool = True


@check("H08", source="script")
def local_early_stop(script: Script) -> Findings:
    """Report a loop with collectives that a rank leaves because of its own data."""
    done: set[ast.AST] = set()
    for _, zero, _ in trees_of(script):
        for finding, node in _walk(script, zero, Way()):
            if node not in done:
                done.add(node)
                yield finding
    # H02 reports ranks that leave because of their number.
    done |= {one.more.node for one in differences_of(script) if isinstance(one.more, Leave)}
    for module in script.modules:
        breaks = [node for node in module.nodes if isinstance(node, ast.Break) and node not in done]
        for node in breaks:
            yield from _break_by_name(script, node, module.scope_of(node))


def _break_by_name(script: Script, node: ast.Break, scope: Scope) -> Findings:
    """Flag `if rank == 0: … break` in a training loop, and `if bad_epochs >= patience: break` in
    a DDP script in which the ranks never exchange a decision."""
    around = script.context(node, scope.module)
    last = max((place for place, one in enumerate(around) if isinstance(one, Loop)), default=-1)
    tests = [one for one in around[last + 1 :] if isinstance(one, If) and not one.exits]
    if last < 0 or not is_in_training(script, scope):
        return
    guard = next((one for one in tests if is_for_one_rank(one.test, one.taken)), None)
    if guard is not None:
        why = (
            f"Only one rank leaves the loop here (`{code(guard.test)}`), while the others continue."
        )
        doubt = "if the loop contains a collective or a DDP backward pass"
    else:
        guard = next((one for one in tests if PATIENCE.search(code(one.test, 200))), None)
        if guard is None or not script.calls_of(DDP) or script.methods(*COLLECTIVES - {"barrier"}):
            return
        why = f"Each rank decides for itself when to stop (`{code(guard.test)}`)."
        doubt = "if the ranks evaluate different data"
    yield found(script, "H08", "suspect", at(node, scope), why, doubt=doubt)


def _walk(script: Script, nodes: list[Node], way: Way) -> Iterator[tuple[Finding, ast.AST]]:
    for node in nodes:
        match node:
            case Inline():
                yield from _walk(script, node.body, Way((), way.sure))
            case Repeat():
                inner = Way((*way.loops, node), way.sure)
                yield from _while(script, node, way)
                yield from _walk(script, node.body, inner)
            case Fork():
                yield from _fork(script, node, way)
                sure = way.sure and node.nature in ("same", "local")
                for branch in (node.then, node.other):
                    yield from _walk(script, branch, Way(way.loops, sure))


def _while(script: Script, loop: Repeat, way: Way) -> Iterator[tuple[Finding, ast.AST]]:
    """Report `while loss > 0.1:` loops whose body computes the loss."""
    scope, meet = _scope_of(loop), _first_meet(loop.body)
    if not isinstance(loop.node, ast.While) or scope is None or meet is None:
        return
    test = loop.node.test
    inside = set(ast.walk(loop.node))
    names = [part.id for part in ast.walk(test) if isinstance(part, ast.Name)]
    bound = [script.lookup(name, scope) for name in names]
    given = [one for pair in bound if pair for one in pair[1] if one.node in inside]
    tests = [test, *(one.value for one in given if one.value is not None)]
    natures = [script.nature(test, scope), *map(script.nature_of_definition, given)]
    sure = way.sure and "local" in natures
    if sure or any(_may_be_local(script, one, scope) for one in tests):
        yield _finding(script, loop.node, scope, test, meet, sure), loop.node


def _fork(script: Script, fork: Fork, way: Way) -> Iterator[tuple[Finding, ast.AST]]:
    flag = _flag_of_some_ranks(script, fork) if fork.nature != "local" else None
    local = fork.nature == "local" and _is_sharded(script, fork.test, fork.scope) is not False
    if not local and flag is None and not _may_be_local(script, fork.test, fork.scope):
        return
    sure = way.sure and (local or flag is not None)
    for branch, other in ((fork.then, fork.other), (fork.other, fork.then)):
        leave = next((one for one in branch if isinstance(one, Leave)), None)
        if leave is None or leave.how == "raise" or not way.loops:
            continue
        loops = way.loops[-1:] if leave.how in ("break", "continue") else way.loops
        waits = other if leave.how == "continue" else [one for loop in loops for one in loop.body]
        meet = _first_meet(waits)
        if meet is not None and not (leave.how == "continue" and _meet_in(branch, meet)):
            # `continue` often skips cases that never occur, such as an empty batch.
            certain = sure and leave.how != "continue"
            finding = _finding(script, leave.node, fork.scope, fork.test, meet, certain, flag)
            yield finding, leave.node


def _first_meet(nodes: list[Node]) -> Meet | None:
    """Return the first call that definitely waits for all ranks, or else the first that may."""
    every = list(all_meets(nodes))
    return next((meet for meet in every if meet.sure), every[0] if every else None)


def _is_sharded(script: Script, test: ast.expr, scope: Scope) -> bool | None:
    """Return whether ranks get different batches, or None if no loader is involved."""
    calls = [call for call in script.contributors(test, scope) if call.target == LOADER]
    return any(map(partial(_divides, script), calls)) if calls else None


def _divides(script: Script, loader: Call) -> bool:
    """Return whether each rank's loader yields other batches: a sampler or the dataset divides the
    samples, or each rank shuffles them differently."""
    if any(loader.argument(99, name) is not None for name in ("sampler", "batch_sampler")):
        return True
    data, shuffle = loader.argument(0, "dataset"), loader.argument(2, "shuffle")
    own = script.seeds_differ and bool(shuffle and script.truth(shuffle, loader.scope, 0))
    return own or bool(data and script.nature(data, loader.scope) in ("rank", "local"))


def _may_be_local(script: Script, test: ast.expr, scope: Scope) -> bool:
    """Return whether a condition uses this rank's own batches, and nothing reduces the value."""
    if script.nature(test, scope) != "unknown" or not _is_sharded(script, test, scope):
        return False
    calls = script.contributors(test, scope)
    return not any(call.method in COLLECTIVES or script.reduces(call) for call in calls)


def _meet_in(branch: list[Node], meet: Meet) -> bool:
    """Return whether the branch that leaves the loop body early calls the same collective."""
    return any(one.op == meet.op for one in all_meets(branch))


def _scope_of(loop: Repeat) -> Scope | None:
    meet = _first_meet(loop.body)
    if meet is None:
        return None
    scope: Scope = meet.call.module.scope_of(loop.node)
    return scope


def _finding(
    script: Script,
    node: ast.AST,
    scope: Scope,
    test: ast.expr,
    meet: Meet,
    sure: bool,
    flag: Place | None = None,
) -> Finding:
    where = at(node, scope)
    clock = any(call.target in CLOCKS for call in script.contributors(test, scope))
    source = "its own clock" if clock else "its own data"
    if flag is not None:
        source = f"a flag that only some ranks set ({line_of(flag, where)})"
    why = (
        f"Each rank decides here based on {source} (`{code(test)}`), and nothing makes the ranks "
        "agree. When one rank leaves first, the others wait for it in "
        f"`{code(meet.call.node.func)}` "
        f"({line_of(meet.call, where)})."
    )
    doubt = "" if sure and meet.sure and not clock else "if the ranks ever decide differently"
    also = (meet.call,) if flag is None else (meet.call, flag)
    return found(script, "H08", "error", where, why, doubt=doubt, also=also)


def _flag_of_some_ranks(script: Script, fork: Fork) -> Place | None:
    """Find `stop.fill_(1)` under `if rank == 0:`, if the loop then tests `stop` to break."""
    names = {dotted_key(part) for part in ast.walk(fork.test)}
    for node in ast.walk(fork.scope.node):
        key = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            key = dotted_key(node.func.value) if node.func.attr.endswith("_") else None
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            key = dotted_key(node.targets[0].value)
        if key is None or key not in names or script.is_reduced(key, fork.scope):
            continue
        tests = script.context(node, fork.scope.module)
        if any(isinstance(x, If) and script.nature(x.test, fork.scope) == "rank" for x in tests):
            return at(node, fork.scope)
    return None
