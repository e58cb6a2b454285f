"""S13: all_reduce of a loss that still belongs to the graph."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.events import Backward, Collective
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Entry, Message, check
from paralab.doctor.static.facts import Call
from paralab.doctor.static.models import is_decided, is_without_grad
from paralab.doctor.static.project import Scope, dotted_key, position
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script

ENTRY = Entry(
    id="S13",
    title="all_reduce of a loss that still belongs to the graph",
    symptom="'c10d::allreduce_: an autograd kernel was not registered … may lead to silently incorrect behavior'.",
    cause="The collective overwrites a value that backward still needs, and autograd does not see the change.",
    fix="Reduce a copy: `loss.detach().clone()`.",
    example="""\
- dist.all_reduce(loss)
+ shown = loss.detach().clone()
+ dist.all_reduce(shown)
  loss.backward()
""",
    messages=(
        Message(
            r"c10d::(?P<call>\w+?)_?: an autograd kernel was not registered",
            "backward() passes through a collective ({call}): the reduced tensor still belongs to the "
            "graph. What backward computes there is not the derivative of the reduction.",
            kind="printed",
        ),
    ),
)
_CUTS = ("detach", "item", "tolist", "numpy", "tensor")


@check("S13", source="script")
def reduced_before_backward(script: Script) -> Iterator[Finding]:
    """Report an all_reduce of a loss before its backward()."""
    for reduce in script.calls_of("torch.distributed.all_reduce", "torch.distributed.reduce"):
        given = reduce.argument(0, "tensor")
        if given is None or dotted_key(given) is None or is_without_grad(script, reduce):
            continue
        for backward in script.methods("backward"):
            if backward.receiver is None or not _reaches(script, given, reduce, backward):
                continue
            sure = is_decided(script, reduce) and is_decided(script, backward)
            why = (
                f"This overwrites `{code(given)}` before `{code(backward.node.func)}()` "
                f"({line_of(backward, reduce)}). Autograd does not see the other ranks' part, "
                "so a division by the number of ranks makes the gradients too small."
            )
            fix = "Reduce a copy: shown = loss.detach().clone(); dist.all_reduce(shown)."
            severity: Severity = "error" if sure else "suspect"
            yield found(script, "S13", severity, reduce, why, fix, also=(backward,))
            break


@check("S13", source="script")
def reduce_in_loss(script: Script) -> Iterator[Finding]:
    """Suspect a loss module that reduces or gathers in `forward`, hidden from autograd."""
    for call in script.calls_of(*(f"torch.distributed.{name}" for name in _IN_FORWARD)):
        owner = call.scope.class_around
        if owner is None or call.scope.name != "forward" or "loss" not in owner.name.lower():
            continue
        given = code(call.node, 200)
        if is_without_grad(script, call) or "detach" in given or not script.is_a(owner, "Module"):
            continue
        why = (
            f"`{code(call.node.func)}` is not part of the graph: gradients of the other ranks' part are missing. "
            "Certain if the result takes part in the loss."
        )
        fix = "Use torch.distributed.nn.functional, whose collectives have a backward pass."
        yield found(script, "S13", "suspect", call, why, fix)


_IN_FORWARD = ("all_reduce", "all_gather", "all_gather_into_tensor")


def _reaches(script: Script, given: ast.expr, reduce: Call, backward: Call) -> bool:
    """Return whether backward starts from the reduced tensor, here or in a calling function."""
    assert backward.receiver is not None
    if backward.scope is reduce.scope:
        if position(backward.node) < position(reduce.node) or not _in_graph(
            script, given, reduce.scope
        ):
            return False
        own = script.reaching(given, reduce.scope)
        return any(
            dotted_key(part) == dotted_key(given) and set(own) & set(script.reaching(part, where))
            for part, where in _ingredients(script, backward.receiver, backward.scope)
        )
    for definition in script.reaching(given, reduce.scope):
        for caller in script.callers(reduce.scope) if definition.how == "parameter" else ():
            values = [*caller.node.args, *(k.value for k in caller.node.keywords)]
            if caller.scope is backward.scope and not is_without_grad(script, caller):
                used = [part for part, _ in _ingredients(script, backward.receiver, backward.scope)]
                if caller.node in used and any(_in_graph(script, v, caller.scope) for v in values):
                    return True
    return False


def _ingredients(script: Script, node: ast.expr, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """Yield the expressions behind a tensor in a function, up to a cut in the graph."""
    waiting, seen = [node], set[ast.expr]()
    while waiting and len(seen) < 100:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        yield value, scope
        if isinstance(value, ast.Call):
            if isinstance(value.func, ast.Attribute):
                if value.func.attr in _CUTS:
                    continue
                waiting.append(value.func.value)
            waiting.extend(value.args)
        elif isinstance(value, ast.Name):
            own = script.reaching(value, scope)
            waiting.extend(one.value for one in own if one.value is not None and one.scope is scope)
        else:
            waiting.extend(one for one in ast.iter_child_nodes(value) if isinstance(one, ast.expr))


def _in_graph(script: Script, node: ast.expr, scope: Scope) -> bool:
    """Return whether a tensor comes from a forward pass or a loss and was not detached."""
    return any(
        isinstance(part, ast.Call)
        and part in script.call_at
        and script.is_kind(part, where, "loss", "output")
        and not is_without_grad(script, script.call_at[part])
        for part, where in _ingredients(script, node, scope)
    )


@check_each_rank("S13")
def reduced_in_graph(rank: WatchedRank) -> Finding | None:
    """Report a collective on a tensor that a later backward went back through."""
    for backward in rank.of(Backward):
        calls = [e for e in rank.of(Collective) if e.in_graph and e.t < backward.t]
        if not backward.reduced or not calls:
            continue
        call = calls[-1]
        why = (
            f"This {call.op} overwrites a tensor that the backward at {backward.site} goes back "
            "through. Autograd does not see the other ranks' part: the value belongs to all "
            "ranks, but the gradient only to this one."
        )
        evidence = f"rank {rank.rank}: reduced {call.value}, backward started from {backward.loss}"
        return make_finding("S13", "error", why, call, evidence)
    return None
