"""G01: The loss is not divided by the accumulation steps.

Symptom: No error. With N accumulated passes, the gradient is N times too large.
Cause: Gradients add up over backward passes. The sum of N means is N times the mean over the large batch.
Fix: Divide the loss by N before `backward`.
Reported: verl-project/verl#3332

- loss = criterion(model(x), y)
+ loss = criterion(model(x), y) / N
  loss.backward()
  if (i + 1) % N == 0:
      optimizer.step()
      optimizer.zero_grad()
"""

import ast

from paralab.doctor.events import Step
from paralab.doctor.failures.accumulation.accumulating import accumulations, divides_by_accumulation
from paralab.doctor.failures.accumulation.windows import Window, windows
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Edit, Finding, Findings, check, describe
from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.facts import SAME_VALUE, Call
from paralab.doctor.static.names import kind_of_made
from paralab.doctor.static.project import Scope
from paralab.doctor.static.report import code, found, line_of, replace
from paralab.doctor.static.script import Script
from paralab.doctor.windows import Window as Observed
from paralab.doctor.windows import accumulated, is_close

ENTRY = describe(__doc__, silent=True)


_ADAMS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
NO_CLIPPING = 1000  # no usual gradient norm exceeds it
_SCALINGS = ("div", "div_", "mul", "mul_", "true_divide", "multiply", "divide")


@check("G01", source="script")
def undivided_loss(script: Script) -> Findings:
    """Report a step that adds up multiple mean losses without dividing them or the gradients."""
    if _changes_gradients(script):
        return
    judged: set[Call] = set()
    is_mean = "if each loss is a mean over its micro-batch"
    for window in windows(script):
        call = window.backward.call
        loss = _loss_of(script, call)
        judged.add(call)
        if window.number == 1 or loss is None:
            continue
        reductions, factors = _trace(script, loss, call.scope)
        if "sum" in reductions or not reductions or _is_divided(window, factors, call):
            continue
        many = window.many if window.size else "all"
        why = f"{window.stepping} adds up the gradients of {many} backward passes, but nothing divides the loss by that number."
        fix = f"Divide the loss: `({code(loss)} / {window.size_text}).backward()`."
        doubt = "" if reductions == {"mean"} and not window.is_optional else is_mean
        if _ignores_scale(script, window.step.call):
            doubt = doubt or "if something depends on the gradients' scale, which Adam ignores"
        also, edits = (window.step.call,), _division(script, window, loss)
        yield found(script, "G01", "error", call, why, fix, doubt=doubt, also=also, edits=edits)
    for call, step in () if divides_by_accumulation(script) else accumulations(script):
        is_fabric = call.target.endswith("Fabric.backward")  # it never divides the loss
        if call not in judged and (is_fabric or not script.imports("accelerate", "deepspeed")):
            why = f"`{code(step.node)}` ({line_of(step, call)}) runs only after multiple backward passes, and nothing divides the loss."
            yield found(script, "G01", "suspect", call, why, doubt=is_mean, also=(step,))


def _ignores_scale(script: Script, step: Call) -> bool:
    """Return whether an optimizer's step does not depend on the scale of the gradients: Adam
    divides by it. Clipping, or weight decay that is added to the gradients, does depend on it."""
    makers = script.makers(step.argument(0, "optimizer") or step.receiver or step.node, step.scope)
    clips = [
        script.evaluate(bound, call.scope, 0) if bound is not None else None
        for call in script.methods("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")
        for bound in [call.argument(1, "max_norm")]
    ]
    return bool(makers) and all(
        one.last_name in _ADAMS
        and (one.last_name == "AdamW" or one.argument(4, "weight_decay") is None)
        and all(isinstance(bound, (int, float)) and bound >= NO_CLIPPING for bound in clips)
        for one in makers
    )


def _loss_of(script: Script, backward: Call) -> ast.expr | None:
    """Return the loss in `loss.backward()`, `scaler.scale(loss).backward()`, or
    `fabric.backward(loss)`."""
    if backward.node.args and code(backward.receiver).endswith("fabric"):
        return backward.node.args[0]
    call = script.call_at.get(backward.receiver) if backward.receiver is not None else None
    return call.argument(0, "outputs") if call and call.method == "scale" else backward.receiver


def _trace(
    script: Script, loss: ast.expr, scope: Scope
) -> tuple[set[str], list[tuple[ast.expr, Scope]]]:
    """Return the reductions of a loss ("mean", "sum", or "" if unknown) and its factors."""
    reductions: set[str] = set()
    factors: list[tuple[ast.expr, Scope]] = []
    averaged: list[tuple[ast.expr, Scope]] = []  # in `x.mean()`: only factors of x matter
    seen: set[ast.AST] = set()
    for found_here, waiting in ((reductions, [(loss, scope)]), (set[str](), averaged)):
        while waiting and len(seen) < 100:
            node, where = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            match node:
                case ast.BinOp(left, ast.Div(), right):
                    factors.append((right, where))
                    waiting.append((left, where))
                case ast.BinOp(left, ast.Mult(), right):
                    numbers = [one for one in (left, right) if not _has_call(script, one, where)]
                    factors += [(one, where) for one in numbers]
                    waiting += [(one, where) for one in (left, right) if one not in numbers]
                case ast.BinOp(left, _, right):
                    waiting += [
                        (one, where) for one in (left, right) if not isinstance(one, ast.Constant)
                    ]
                case ast.Name() | ast.Attribute() if script.reaching(node, where):
                    for one in script.reaching(node, where):
                        if one.how == "parameter":
                            waiting += list(script.arguments_for(one)) or [
                                (ast.Constant(""), where)
                            ]
                        elif one.how in ("assign", "augmented") and one.value is not None:
                            waiting.append((one.value, one.scope))
                        else:
                            found_here.add("")
                case ast.Call() if node in script.call_at:
                    found_here |= _follow(script, script.call_at[node], waiting, factors, averaged)
                case _:
                    found_here.add("")
    return reductions, factors


def _follow(
    script: Script,
    call: Call,
    waiting: list[tuple[ast.expr, Scope]],
    factors: list[tuple[ast.expr, Scope]],
    averaged: list[tuple[ast.expr, Scope]],
) -> set[str]:
    """Follow a loss into the call that computes it."""
    makers = script.makers(call.node.func, call.scope) if not call.target else []
    is_loss = any(kind_of_made(one.target) == "loss function" for one in makers)
    if is_loss or kind_of_made(call.target) == "loss":
        given = (makers[0] if is_loss else call).argument(99, "reduction")
        return {"mean"} if given is None else {str(getattr(given, "value", ""))} - {"none"}
    if call.method == "mean" and call.receiver is not None:
        averaged.append((call.receiver, call.scope))
        return {"mean"}
    if call.receiver is not None and call.method in (*_SCALINGS, *SAME_VALUE, "squeeze"):
        waiting.append((call.receiver, call.scope))
        factors += [(one, call.scope) for one in call.node.args if call.method in _SCALINGS]
        return set()
    if call.function is not None and call.made is None and call.function.returns:
        waiting += [(one, call.function) for one in call.function.returns]
        return set()
    return {"sum"} if call.method == "sum" else {""}


def _has_call(script: Script, node: ast.expr, scope: Scope) -> bool:
    """Return whether a factor is part of the loss rather than a number."""
    if isinstance(node, ast.Call) and script.call_at[node].target.startswith("builtins."):
        return False
    calls = script.contributors(node, scope)
    return any(not call.target.startswith("builtins.") for call in calls)


def _is_divided(window: Window, factors: list[tuple[ast.expr, Scope]], backward: Call) -> bool:
    script, number = window.script, window.number
    for node, scope in factors:
        value = script.evaluate(node, scope, 0)
        if not isinstance(value, (int, float)):
            return True  # a computed divisor, which may be correct
        if value not in (0, 1) and (
            number is None or is_close(value, number) or is_close(value, 1 / number)
        ):
            return True
    key = dotted_key(backward.receiver) if backward.receiver is not None else None
    inplace = script.methods("div_", "mul_")
    return any(key and one.receiver and dotted_key(one.receiver) == key for one in inplace)


def _changes_gradients(script: Script) -> bool:
    """Return whether a call or statement rescales gradients: `p.grad /= n`, `p.grad.div_(n)`."""
    stored = (
        definition
        for scope in script.scopes
        for key, definitions in scope.definitions.items()
        if key.endswith(".grad")
        for definition in definitions
    )
    if any(getattr(one.value, "value", "") is not None for one in stored):
        return True
    scaled = [*script.methods(*_SCALINGS), *script.methods("_foreach_div_", "_foreach_mul_")]
    return any("grad" in code(call.node, 200) for call in scaled)


def _division(script: Script, window: Window, loss: ast.expr) -> tuple[Edit, ...]:
    call, size = window.backward.call, window.size
    if size is None or window.is_apart or not isinstance(loss, ast.Name):
        return ()
    if size[1] is not call.scope and not isinstance(size[0], ast.Constant):
        return ()
    text = f"{loss.id} / {window.size_text}"
    return replace(script, call.module, loss, f"({text})" if loss is call.receiver else text)


@check_each_rank("G01")
def undivided(rank: WatchedRank) -> Finding | None:
    every = list(accumulated(rank))
    plain = [window for window in every if _is_plain_sum(window)]
    checked = [_gradient_was_rescaled(window) for window in plain]
    if not plain or any(checked):
        return None
    passes = plain[0].micro_steps
    count = len(passes)
    why = (
        f"One optimizer step adds up the gradients of {count} backward passes, and nothing "
        f"divides their mean losses by {count}. The gradient is {count} times too large."
    )
    losses = "; ".join(f"{p.loss_value:.4g} -> {p.backward.loss:.4g}" for p in passes[:4])
    evidence = f"rank {rank.rank}, {len(plain)} of {len(every)} steps: loss -> backward: {losses}"
    certain = all(one.batches for one in passes) and False in checked
    doubt = "if the losses are parts of one batch and nothing divides the gradients later"
    doubt = "" if certain else doubt
    return make_finding("G01", "error", why, passes[0].backward, evidence, doubt=doubt)


def _is_plain_sum(window: Observed) -> bool:
    return all(
        one.factor is not None and is_close(one.factor, 1.0) and one.is_mean
        for one in window.micro_steps
    )


def _gradient_was_rescaled(window: Observed) -> bool | None:
    """Return whether gradients were divided between the last backward and the step, if known."""
    last = window.micro_steps[-1]
    after = window.clips[0].norm if window.clips else _norm(window.step)
    if last.backward.grad_norm is None or after is None or not last.scale:
        return None
    before = last.backward.grad_norm
    return not any(is_close(before / scale, after) for scale in (1.0, last.scale))


def _norm(step: Step | None) -> float | None:
    norms = [value[0] for value in (step.gradients if step and step.gradients else []) if value]
    return sum(norm * norm for norm in norms) ** 0.5 if norms and min(norms) >= 0 else None
