"""G04: The optimizer steps on gradients that are not averaged.

Symptom: No error. The ranks' parameters drift apart and stay different.
Cause: The last pass before the step also runs under `no_sync()`, or the epoch ends in the middle of an accumulation window.
Fix: Run the last micro-batch before every step outside `no_sync`, including the last one of an epoch.

- with model.no_sync():
-     loss = criterion(model(x), y)
-     loss.backward()
+ loss = criterion(model(x), y)
+ loss.backward()
  optimizer.step()
"""

import ast
from collections.abc import Iterator
from itertools import product

from paralab.doctor.failures.accumulation.synchronizing import forwards_of
from paralab.doctor.failures.accumulation.windows import (
    ASSUMED,
    Window,
    averaged_by,
    quiet,
    timelines,
    windows,
)
from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.facts import If
from paralab.doctor.static.project import Module, Scope
from paralab.doctor.static.report import at, code, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import Event, occurrences

ENTRY = describe(__doc__, silent=True)
ONE_TEST = "Use one condition for both: use `no_sync` exactly when no step follows."


@check("G04", "G05", source="script")
def never_synchronized(script: Script) -> Findings:
    """Report DDP forwards that all run under `no_sync` (G05 if backward does not)."""
    passes = [
        (event, forwards, next((one for one in events[place:] if one.role == "step"), None))
        for events, place, event in occurrences(timelines(script), "backward")
        if (forwards := forwards_of(script, event))
    ]
    if not passes or not all(_is_quiet(script, one) for _, many, _ in passes for one in many):
        return
    event, forwards, step = passes[0]
    by = averaged_by(script, step) if step is not None else ""
    if step is None or by == "":
        return
    doubt = f"if {by} does not average the parameters" if by else ""
    forward, call = forwards[0].call, event.call
    if _is_quiet(script, event):
        why = (
            f"Every forward and backward pass, such as {line_of(call, step.call)}, runs under `no_sync`, so "
            f"`{code(step.call.node)}` uses gradients that were never averaged. The ranks drift apart."
        )
        yield found(script, "G04", "error", step.call, why, doubt=doubt, also=(call,))
    else:
        why = (
            f"The forward pass `{code(forward.node.func)}(…)` ({line_of(forward, call)}) runs "
            "under `no_sync`, and DDP decides there whether to synchronize. This backward pass "
            "therefore does not average gradients, and the ranks drift apart."
        )
        yield found(script, "G05", "error", call, why, doubt=doubt, also=(forward,))


def _is_quiet(script: Script, event: Event) -> bool:
    return any(quiet(script, *block) is True for block in event.blocks())


@check("G04", source="script")
def unsynchronized_boundary(script: Script) -> Findings:
    """Report an iteration that steps although its passes ran under `no_sync`."""
    sure = list(_unsynchronized_boundary(script))
    yield from sure or _another_remainder(script)


def _unsynchronized_boundary(script: Script) -> Findings:
    for window in windows(script):
        forwards = forwards_of(script, window.backward)
        if (
            not forwards
            or window.guard is None
            or window.is_apart
            or averaged_by(script, window.step) == ""
        ):
            continue
        if any(one.is_apart and one.loop == window.loop for one in windows(script)):
            continue
        size = window.number or ASSUMED
        known = (
            window.length is not None and window.length >= size
        )  # in a shorter loop, a window spans multiple epochs
        for length in [window.length or 0] if known else [2 * size, 2 * size + 1]:
            turn = _unsynchronized_turn(window, forwards[0], length)
            if turn is None:
                continue
            partial = turn == length - 1 and length % size != 0
            which = (
                "the last batch, before its window is full"
                if partial
                else f"micro-batch {turn + 1}"
            )
            step, forward = window.step.call, forwards[0].call
            why = (
                f"`{code(step.node)}` runs after {which}, but the forward pass of that micro-batch "
                f"({line_of(forward, step)}) is under `no_sync`, so its gradients are not averaged."
            )
            doubt = "if the number of batches is not a multiple of the window" if partial else ""
            yield found(script, "G04", "error", step, why, ONE_TEST, doubt=doubt, also=(forward,))
            break


def _unsynchronized_turn(window: Window, forward: Event, length: int) -> int | None:
    for turn in range(length):
        env, passes = window.env(turn, length), (forward, window.backward)
        runs = all(window.happens(one, env) for one in (*passes, window.step))
        if runs and all(window.is_quiet(one, env) for one in passes):
            return turn
    return None


def _no_syncs(script: Script) -> Iterator[tuple[ast.Attribute, Scope]]:
    for module in script.modules:
        for node in module.nodes if "no_sync" in module.text else ():
            if isinstance(node, ast.Attribute) and node.attr == "no_sync":
                yield node, module.scope_of(node)


@check("G04", source="script")
def always_quiet(script: Script) -> Findings:
    """Report `no_sync` under `i != n` in a loop over `range(n)`, where `i != n` always holds."""
    for node, scope in _no_syncs(script):
        for item in script.context(node, scope.module):
            taken = isinstance(item, If) and item.taken
            test = (
                _always_true(script, item.test, scope) if isinstance(item, If) and taken else None
            )
            if test is not None:
                why = f"`{code(test)}` is always true, so the last micro-batch before the step runs under `no_sync` too."
                fix = f"Compare with the last iteration: `{code(test)} - 1`."
                yield found(script, "G04", "error", at(test, scope), why, fix)


def _another_remainder(script: Script) -> Findings:
    """Flag `no_sync` under `i % n != 0` if the step runs under `(i + 1) % n == 0`."""
    for node, scope in _no_syncs(script):
        quiet_when, where = _remainders(script, node, scope.module), at(node, scope)
        for step in [call for call in script.methods("step") if call.module is scope.module]:
            for one, two in product(quiet_when, _remainders(script, step.node, scope.module)):
                if _counters(one) == _counters(two) and code(one.left) != code(two.left):
                    why = f"`no_sync` depends on `{code(one)}`, but the step ({line_of(step, where)}) depends on `{code(two)}`."
                    doubt = "if both count the same backward passes"
                    yield found(
                        script, "G04", "suspect", where, why, ONE_TEST, doubt=doubt, also=(step,)
                    )
                    return


def _remainders(script: Script, node: ast.AST, module: Module) -> list[ast.BinOp]:
    """Return the `i % n` expressions in a node's enclosing conditions."""
    tests = [one.test for one in script.context(node, module) if isinstance(one, If)]
    parts = [part for test in tests for part in ast.walk(test)]
    return [part for part in parts if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod)]


def _counters(remainder: ast.BinOp) -> set[str]:
    """Return the last part of each name in `i % n`."""
    names = (dotted_key(part) for part in ast.walk(remainder))
    return {name.rpartition(".")[2] for name in names if name} - {"self", "args"}


def _always_true(script: Script, test: ast.expr, scope: Scope) -> ast.expr | None:
    """Return a condition `i != n` or `i < n` whose `i` comes from `range(n)`."""
    for part in ast.walk(test):
        match part:
            case ast.Compare(ast.Name() as counter, [ast.NotEq() | ast.Lt()], [limit]):
                ranges = {f"range({code(limit, 200)})", f"range(0, {code(limit, 200)})"}
                if any(code(one.value, 200) in ranges for one in script.reaching(counter, scope)):
                    return part
    return None
