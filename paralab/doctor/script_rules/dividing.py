"""Gradient accumulation: is the loss divided by the number of backward calls that a step adds
up?"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.finding import Edit, Finding, Severity
from paralab.doctor.registry import check
from paralab.doctor.script.editing import function_of, swapped
from paralab.doctor.script.pointing import called, found, short
from paralab.doctor.script.questions import comes_from, is_forward, loop_over, origins, roles
from paralab.doctor.script.reading import Script
from paralab.doctor.script.updates import (
    Backward,
    Window,
    backwards,
    counts,
    size_of,
    steps,
    windows,
)
from paralab.doctor.script.values import (
    Attr,
    Branch,
    Call,
    Computed,
    Constant,
    Items,
    Loop,
    Made,
    Value,
    options,
    same,
)

_SCALINGS = {"div", "div_", "mul", "mul_", "true_divide", "multiply", "divide"}


@check("G01", source="script")
def undivided_loss(script: Script) -> Iterator[Finding]:
    if _changes_gradients(script):
        return
    for window in windows(script):
        backward, number = window.backward, window.number
        kind = reduction(backward)
        if number == 1 or kind == "sum" or not backward.forwards or _is_divided(script, window):
            continue
        if window.guard is None and not _same_work_each_turn(window):
            continue
        size = window.size_text
        many = f"{number}" if number else f"`{size}`" if size else "all"
        times = f"{many} times" if many != "all" else "as many times as there are turns"
        how = (
            "the mean over its batch"
            if kind == "mean"
            else "a mean over its batch, as far as can be read"
        )
        why = (
            f"`{called(window.step)}()` in line {window.step.line} uses the sum of the gradients of {many} backward calls, and "
            f"each loss is {how}: the gradient is {times} too large."
        )
        if kind is None:
            why += " Certain if the loss is a mean and not a sum."
        fix = f"Divide the loss by the number of backward calls per step: `{_loss_text(backward)} / {size or 'n'}`."
        if window.is_apart:
            fix += (
                f" In both branches: also where the step follows, before line {window.step.line}."
            )
        severity: Severity = "error" if kind == "mean" else "suspect"
        edits = () if window.is_apart else _division(script, window, size)
        yield found(
            script, "G01", severity, backward.call, why, fix, also=(window.step,), edits=edits
        )


def _changes_gradients(script: Script) -> bool:
    """`p.grad /= n`, `p.grad.div_(n)`: the sum is divided afterwards."""
    if any(store.name == "grad" and not _is_none(store.value) for store in script.stores):
        return True
    if any(True for _ in script.methods("_foreach_div_", "_foreach_mul_")):
        return True
    return any(
        isinstance(call.receiver, Attr) and call.receiver.name == "grad"
        for call in script.methods(*_SCALINGS)
    )


def _is_none(value: Value) -> bool:
    return isinstance(value, Constant) and value.value is None


def _stops(value: Value) -> bool:
    return isinstance(value, Made) and (is_forward(value.call) or _is_loss(value.call))


def _is_loss(call: Call) -> bool:
    return "loss value" in roles(call.result) or (
        call.method == "__call__" and "loss" in roles(call.receiver)
    )


def reduction(backward: Backward, batches: bool = False) -> str | None:
    """`mean` or `sum`: how the loss was made of its batch's samples; None where that cannot be
    read. `batches`: sums are over batches, not over samples."""
    kinds, terms = set(), False
    for value in origins(backward.loss, _stops):
        if not isinstance(value, Made):
            continue
        call = value.call
        if _is_loss(call):
            made = (
                next((o.call for o in options(call.receiver) if isinstance(o, Made)), call)
                if call.receiver
                else call
            )
            given = made.keywords.get("reduction")
            kinds.add(given.value if isinstance(given, Constant) else None if given else "mean")
        elif call.method in ("mean", "sum") and (call.receiver or call.args):
            if batches or _adds_terms(call, backward):
                terms = True
            else:
                kinds.add(call.method)
    kinds.discard("none")
    if "sum" in kinds or (
        terms and not kinds
    ):  # terms of which nothing is known may be sums themselves
        return "sum"
    return kinds.pop() if len(kinds) == 1 else None


def _adds_terms(call: Call, backward: Backward) -> bool:
    """`sum(losses)`: Python's sum of the few terms of one loss, a list or the values of a dict; not
    of the samples of a batch, whose losses are worked out in a loop of their own."""
    if call.target != "builtins.sum" or not call.args:
        return False
    inner = (
        context
        for value in origins(call.args[0], _stops)
        if isinstance(value, Made)
        for context in value.call.context
    )
    if any(isinstance(context, Loop) and context not in backward.call.context for context in inner):
        return False
    return all(_is_list_of_terms(way) for way in options(call.args[0]))


def _is_list_of_terms(value: Value) -> bool:
    if isinstance(value, Computed) and isinstance(value.node, ast.ListComp | ast.GeneratorExp):
        over = (part.iter for part in value.node.generators)
        return all(
            isinstance(it, ast.Call)
            and ast.unparse(it.func).endswith((".values", ".items", ".keys"))
            for it in over
        )
    return isinstance(value, Items) or (isinstance(value, Made) and value.call.method == "values")


def _factors(script: Script, loss: Value) -> Iterator[Value]:
    """What the loss is divided or multiplied by on its way."""
    passed = set()
    for value in origins(loss, _stops):
        passed.add(id(value))
        if isinstance(value, Computed) and value.op in ("Div", "Mult"):
            yield from value.parents[1:] if value.op == "Div" else value.parents
        elif isinstance(value, Made) and value.call.method in _SCALINGS:
            yield from value.call.args
    for call in script.methods("div_", "mul_"):
        if call.receiver is not None and any(
            id(option) in passed for option in options(call.receiver)
        ):
            yield from call.args


def _is_divided(script: Script, window: Window) -> bool:
    for factor in _factors(script, window.backward.loss):
        if any(isinstance(o, Made) and is_forward(o.call) for o in origins(factor, _is_length)):
            continue  # a part of the loss itself
        if not _is_plain_number(factor):
            return True  # by something that is computed: it may well be right
        value = factor.value if isinstance(factor, Constant) else None
        if (
            window.number
            and value
            and (value == window.number or abs(value * window.number - 1) < 1e-9)
        ):
            return True
        if window.number is None and window.size is None and value not in (None, 1):
            return True  # `for part in batch.chunk(4)`: the turns cannot be counted here, and somebody has counted them
        if window.size is not None and (
            same(factor, window.size) or any(same(o, window.size) for o in origins(factor))
        ):
            return True
    return False


def _is_length(value: Value) -> bool:
    return isinstance(value, Made) and value.call.target == "builtins.len"


def _is_plain_number(value: Value) -> bool:
    return isinstance(value, Constant)


def _same_work_each_turn(window: Window) -> bool:
    """Every turn of the inner loop takes another part of the data through the same model; not one
    loss of several per turn."""
    over = window.loop.over
    made = [origin.call for origin in origins(over) if isinstance(origin, Made)]
    return any(
        call.target == "builtins.range" or call.method in ("chunk", "split") for call in made
    ) or comes_from(over, "loader")


def _loss_text(backward: Backward) -> str:
    node = backward.scaling.node if backward.scaling else backward.call.node
    assert isinstance(node, ast.Call)
    if backward.scaling:
        return short(node.args[0]) if node.args else "loss"
    return short(node.func.value) if isinstance(node.func, ast.Attribute) else "loss"


def _division(script: Script, window: Window, size: str | None) -> tuple[Edit, ...]:
    """`loss.backward()` → `(loss / n).backward()`, where n is known at that place."""
    call, scaling = window.backward.call, window.backward.scaling
    if (
        size is None
        or not isinstance(call.node, ast.Call)
        or not isinstance(call.node.func, ast.Attribute)
    ):
        return ()
    if not size.isdigit():
        named = window.guard.node if window.guard else window.loop.node
        if named not in script.nodes.get(call.file, ()):
            return ()
        if function_of(script, call.file, named) is not function_of(script, call.file, call.node):
            return ()
    if scaling is not None:
        inner = (
            scaling.node.args[0]
            if isinstance(scaling.node, ast.Call) and scaling.node.args
            else None
        )
        return (
            swapped(script, scaling.file, inner, f"{ast.unparse(inner)} / {size}")
            if isinstance(inner, ast.Name)
            else ()
        )
    receiver = call.node.func.value
    return (
        swapped(script, call.file, receiver, f"({ast.unparse(receiver)} / {size})")
        if isinstance(receiver, ast.Name)
        else ()
    )


@check("G01", source="script")
def undivided_list_of_losses(script: Script) -> Iterator[Finding]:
    """`losses.append(loss)` in every turn, `sum(losses).backward()` in every n-th. Over steps of a
    sequence it is meant so."""
    for backward in backwards(script):
        for collected, guard, loop in _collected(script, backward):
            step = next(
                (
                    step
                    for step in steps(script)
                    if step.number > backward.call.number and guard in step.context
                ),
                None,
            )
            if step is None or not backward.forwards:
                continue
            window = Window(backward, step, loop, guard, size_of(guard))
            if (
                window.number == 1
                or reduction(backward, batches=True) == "sum"
                or _is_divided(script, window)
            ):
                continue
            many = f"{window.number}" if window.number else f"`{window.size_text or 'n'}`"
            why = (
                f"`{called(collected)}` in line {collected.line} keeps the loss of every batch, and this backward starts from the "
                f"sum of {many} of them: the gradient is {many} times as large as that of one large batch."
            )
            why += " Certain if each loss is a mean over its batch and the batches are to count as one."
            fix = f"Divide the sum: `{_loss_text(backward)} / {window.size_text or 'n'}`."
            yield found(script, "G01", "suspect", backward.call, why, fix, also=(collected, step))
            break


def _collected(script: Script, backward: Backward) -> Iterator[tuple[Call, Branch, Loop]]:
    """The calls that put losses into a list whose sum is differentiated: in every turn of a loop,
    where the backward is not."""
    before = [
        call
        for call in script.methods("append")
        if call.number < backward.call.number and _kept_each_turn(call, backward)
    ]
    guard = (
        next((branch for branch in backward.call.inside(Branch) if counts(branch)), None)
        if before
        else None
    )
    if guard is None:
        return
    loop = loop_over(backward.call, "loader")
    if loop is None:
        return
    sums = (
        value.call
        for value in origins(backward.loss, _stops)
        if isinstance(value, Made) and value.call.method == "sum"
    )
    lists = {
        id(part)
        for call in sums
        for given in (call.receiver, *call.args)
        if given
        for part in _stacked(given)
    }
    for call in before:
        if (
            loop in call.context
            and guard not in call.context
            and any(id(way) in lists for way in options(call.receiver or Value()))
        ):
            yield call, guard, loop


def _kept_each_turn(call: Call, backward: Backward) -> bool:
    """In a loop with the backward, and not in its branch."""
    shared = any(loop in backward.call.context for loop in call.inside(Loop))
    return shared and any(branch not in call.context for branch in backward.call.inside(Branch))


def _stacked(value: Value) -> Iterator[Value]:
    """The lists behind `sum(losses)` or `torch.stack(losses).sum()`."""
    for way in options(value):
        if isinstance(way, Items):
            yield way
        elif (
            isinstance(way, Made)
            and way.call.target in ("torch.stack", "torch.cat")
            and way.call.args
        ):
            yield from _stacked(way.call.args[0])
