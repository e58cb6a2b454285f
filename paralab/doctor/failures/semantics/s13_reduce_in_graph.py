"""S13: all_reduce overwrites a loss before backward.

Symptom: 'c10d::allreduce_: an autograd kernel was not registered … may lead to silently incorrect behavior'.
Cause: The collective overwrites a value that backward still needs, and autograd does not see the change.
Fix: Reduce a copy: `loss.detach().clone()`.

- dist.all_reduce(loss)
+ shown = loss.detach().clone()
+ dist.all_reduce(shown)
  loss.backward()
"""

import ast
from collections.abc import Iterator

from paralab.doctor.events import Backward, Collective
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Finding, Findings, check, describe, printed
from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.facts import Call
from paralab.doctor.static.models import is_decided, is_without_grad
from paralab.doctor.static.project import Scope, position
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    printed(
        r"c10d::(?P<call>\w+?)_?: an autograd kernel was not registered",
        "backward() goes through a collective ({call}) because the reduced tensor is still "
        "part of the graph. The gradient of the collective is wrong.",
    ),
)
_CUTS = ("detach", "item", "tolist", "numpy", "tensor")


@check("S13", source="script")
def reduced_before_backward(script: Script) -> Findings:
    """Report an all_reduce of a loss before its backward()."""
    for reduce in script.calls_of("torch.distributed.all_reduce", "torch.distributed.reduce"):
        given = reduce.argument(0, "tensor")
        if given is None or dotted_key(given) is None or is_without_grad(script, reduce):
            continue
        for backward in script.methods("backward"):
            if backward.receiver is None or not _reaches(script, given, reduce, backward):
                continue
            divided = _is_divided(script, backward)
            sure = divided and is_decided(script, reduce) and is_decided(script, backward)
            why = (
                f"This overwrites `{code(given)}` before `{code(backward.node.func)}()` "
                f"({line_of(backward, reduce)}), and autograd does not see it. If the result is divided by "
                "the number of ranks, the gradients become too small."
            )
            doubt = "" if sure else "if both lines run in one step"
            doubt = doubt if divided else "if the result is divided"
            yield found(script, "S13", "error", reduce, why, doubt=doubt, also=(backward,))
            break


@check("S13", source="script")
def reduce_in_loss(script: Script) -> Findings:
    """Flag a loss module whose `forward` reduces or gathers in a way that autograd does not
    see."""
    for call in script.calls_of(*(f"torch.distributed.{name}" for name in _IN_FORWARD)):
        owner = call.scope.class_around
        if owner is None or call.scope.name != "forward" or "loss" not in owner.name.lower():
            continue
        given = code(call.node, 200)
        if is_without_grad(script, call) or "detach" in given or not script.is_a(owner, "Module"):
            continue
        why = f"`{code(call.node.func)}` is not part of the graph, so the gradients from the other ranks are missing."
        fix = "Use torch.distributed.nn.functional, whose collectives have a backward pass."
        yield found(script, "S13", "suspect", call, why, fix, doubt="if the loss uses the result")


_IN_FORWARD = ("all_reduce", "all_gather", "all_gather_into_tensor")


def _is_divided(script: Script, backward: Call) -> bool:
    """Return whether backward starts from a value that is divided by the number of ranks."""
    assert backward.receiver is not None
    return any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Div)
        and script.is_kind(part.right, where, "world")
        for part, where in script.ingredients(backward.receiver, backward.scope, hops=3)
    )


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
        alias = definition.value if definition.how == "assign" else None
        if isinstance(alias, ast.Name) and _reaches(script, alias, reduce, backward):
            return True
        for caller in script.callers(reduce.scope) if definition.how == "parameter" else ():
            if caller.scope is backward.scope and not is_without_grad(script, caller):
                used = [part for part, _ in _ingredients(script, backward.receiver, backward.scope)]
                live = [each for each in caller.arguments if _in_graph(script, each, caller.scope)]
                passed = [each for each, _ in script.arguments_for(definition) if each in live]
                if (live and caller.node in used) or any(
                    _reaches(script, each, caller, backward) for each in passed
                ):
                    return True
    return False


def _ingredients(script: Script, node: ast.expr, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """Yield the expressions from which a function computes a tensor, back to where the graph is
    cut."""
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
    for backward in rank.of(Backward):
        calls = [e for e in rank.of(Collective) if e.in_graph and e.t < backward.t]
        if not backward.reduced or not calls:
            continue
        call = calls[-1]
        why = (
            f"This {call.op} overwrites a tensor that the backward at {backward.site} goes through. "
            "Autograd does not see it: the value comes from all ranks, but the gradient comes only "
            "from this one."
        )
        return make_finding("S13", "error", why, call)
    return None
