"""Windows of gradient accumulation: the rest of an epoch that fills no window, and a schedule that
runs ahead of the steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from paralab.doctor.finding import Finding, Severity
from paralab.doctor.registry import check
from paralab.doctor.script.agreement import is_alone
from paralab.doctor.script.pointing import called, found, place, test_of
from paralab.doctor.script.questions import comes_from, iterated, number, origins, roles
from paralab.doctor.script.reading import Script
from paralab.doctor.script.settings import known_number
from paralab.doctor.script.turns import counters, happens, length
from paralab.doctor.script.updates import Window, backwards, guard_between, steps, windows
from paralab.doctor.script.values import (
    Branch,
    Call,
    Computed,
    Constant,
    Context,
    Generated,
    Happening,
    Loop,
    Made,
    Parameter,
    Value,
    options,
)


@check("G06", source="script")
def rest_of_the_epoch(script: Script) -> Iterator[Finding]:
    stepping = steps(script)
    for window in windows(script):
        if (
            window.guard is None
            or window.number == 1
            or not _restarts(window)
            or _counts_on(script, window)
        ):
            continue
        usual = window.number or known_number(script, window.size)
        if window.length is not None and usual and window.length % usual == 0:
            continue
        if any(step.number > window.step.number and _follows(step, window) for step in stepping):
            continue
        left = [turn for turn in window.turns(1) if happens(window.step, turn) is True]
        last = window.turns(1)[-1]
        if (
            not left
            or happens(window.backward.call, last) is not True
            or happens(window.step, last) is not False
        ):
            continue
        size = window.number or f"`{window.size_text or 'n'}`"
        why = f"`{called(window.step)}()` runs after every {size} batches only. "
        fate, leaks = _fate_of_the_rest(script, window)
        if window.length is not None and window.number:
            rest = window.length % window.number
            why += f"There are {window.length} batches: the gradients of the last {rest} {fate}."
        else:
            why += (
                f"The gradients of the batches after the last full window {fate}. Certain if the number of batches is not a "
                f"multiple of {size}."
            )
        fix = "Step after the last batch, too (`or i + 1 == len(loader)`), and divide the loss by what the window really has."
        known = window.length is not None and window.number is not None
        severity: Severity = "suspect" if not known else "error" if leaks else "warning"
        yield found(script, "G06", severity, window.step, why, fix, also=(window.backward.call,))


@check("G06", source="script")
def rest_is_not_yielded(script: Script) -> Iterator[Finding]:
    """A generator collects n batches and yields them; what is left when the loader ends is not
    yielded."""
    for backward in backwards(script):
        generated = (
            way
            for loop in backward.call.inside(Loop)
            for way in options(loop.over)
            if isinstance(way, Generated)
        )
        for full in filter(None, map(_yields_when_full, generated)):
            loop, size, batches = full.loop, number(full.size), length(full.loop.over)
            if not comes_from(loop.over, "loader") or (
                size and batches is not None and batches % size == 0
            ):
                continue
            at = Happening(backward.call.number, full.branch.node, loop.file, ())
            rest = (
                f"Of {batches} batches, the last {batches % int(size)} are"
                if size and batches
                else "The batches that are left are"
            )
            why = (
                f"Batches are given on only when `{test_of(full.branch)}`, and nothing is given on after the loop. {rest} never "
                f"trained on ({place(backward.call, at)})."
            )
            if not (size and batches):
                why += " Certain if the number of batches is not a multiple of it."
            fix = "After the loop, yield what is left, too, and divide the loss by what the window really has."
            yield found(
                script,
                "G06",
                "warning" if size and batches else "suspect",
                at,
                why,
                fix,
                also=(backward.call,),
            )


@dataclass(frozen=True)
class _Full:
    """A generator's loop, and the branch in which it yields what it has collected."""

    loop: Loop
    branch: Branch
    size: Value


def _yields_when_full(generated: Generated) -> _Full | None:
    if [type(context) for context in generated.contexts] != [Loop, Branch]:
        return None
    loop, branch = generated.contexts
    assert isinstance(loop, Loop)
    assert isinstance(branch, Branch)
    for test in origins(branch.test):
        if (
            isinstance(test, Computed)
            and test.op in ("Eq", "GtE")
            and branch.taken
            and len(test.parents) == 2
        ):
            counted, size = test.parents
            if (
                isinstance(counted, Made)
                and counted.call.target == "builtins.len"
                and isinstance(loop.node, ast.For)
            ):
                return _Full(loop, branch, size)
    return None


def _fate_of_the_rest(script: Script, window: Window) -> tuple[str, bool]:
    """What becomes of gradients that no step has used when the loop ends, and whether they get into
    another epoch's step."""
    again = [context for context in _around(window) if isinstance(context, Loop)]
    if not again:
        return "are never used", False
    outside = [
        call
        for call in script.methods("zero_grad")
        if again[-1] in call.context and window.loop not in call.context
    ]
    if outside:
        return (
            f"are never used: `{called(outside[0])}()` in {place(outside[0], window.step)} throws them away",
            False,
        )
    return (
        "are added to the first step of the next epoch; those of the last epoch are never used",
        True,
    )


def _counts_on(script: Script, window: Window) -> bool:
    """Does the counter go on from one epoch to the next? Then a window that an epoch has begun is
    filled by the next one."""
    assert window.guard is not None
    modulo: list[Value] = [
        v
        for v in origins(window.guard.test)
        if isinstance(v, Computed) and v.op == "Mod" and counters(v)
    ]
    counting = [counter for test in modulo or [window.guard.test] for counter in counters(test)]
    return any(not _starts_with(script, counter, window) for counter in counting)


def _starts_with(script: Script, counter: Computed, window: Window) -> bool:
    """Does a counter start again whenever the window's loop starts?"""
    if counter.op == "Varying":
        return counter.known.get("loop") is window.loop.node
    if not isinstance(counter.node, ast.AugAssign) or not isinstance(
        counter.node.target, ast.Attribute
    ):
        return any(parent is part for parent in counter.parents for part in iterated(window.loop))
    again = next((loop for loop in reversed(_around(window)) if isinstance(loop, Loop)), None)
    if again is None:
        return not is_alone(window.step)
    attribute = counter.node.target.attr
    sets = (
        store
        for store in script.stores
        if store.name == attribute and isinstance(store.value, Constant)
    )
    return any(again in store.context and window.loop not in store.context for store in sets)


def _around(window: Window) -> tuple[Context, ...]:
    return window.step.context[: window.step.context.index(window.loop)]


def _restarts(window: Window) -> bool:
    """Does the loop go over something that ends? Not `while True`, not a range of steps with a
    batch drawn in each."""
    node = window.loop.node
    if not isinstance(node, ast.For | ast.AsyncFor):
        return False
    if window.length is not None:
        return True
    return comes_from(window.loop.over, "loader") or any(
        isinstance(o, Parameter) for o in origins(window.loop.over)
    )


def _follows(step: Call, window: Window) -> bool:
    """After the loop, in the loop or function around it."""
    loops = [context for context in _around(window) if isinstance(context, Loop)]
    return window.loop not in step.context and all(loop in step.context for loop in loops)


@check("G09", source="script")
def schedule_runs_ahead(script: Script) -> Iterator[Finding]:
    for window in windows(script):
        for call in script.methods("step"):
            if (
                "scheduler" not in roles(call.receiver)
                or window.number == 1
                or window.loop not in call.context
            ):
                continue
            if not _ahead(window, call):
                continue
            size = window.number or f"`{window.size_text or 'n'}`"
            why = (
                f"`{called(call)}()` runs with every micro-batch, `{called(window.step)}()` in line {window.step.line} once in "
                f"{size}: the learning rate moves {size} times as fast as the optimizer. Right only if the schedule counts "
                "micro-batches."
            )
            fix = f"Step the schedule where the optimizer steps, after line {window.step.line}."
            yield found(script, "G09", "warning", call, why, fix, also=(window.step,))


def _ahead(window: Window, call: Call) -> bool:
    if window.guard is None:
        return guard_between(call, window.backward.call, window.loop) is None
    turns = window.turns()
    return any(
        happens(call, turn) is True and happens(window.step, turn) is False for turn in turns
    )
