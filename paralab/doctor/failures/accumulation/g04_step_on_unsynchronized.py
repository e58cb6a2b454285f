"""G04: an optimizer step on gradients that were not synchronized."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.failures.accumulation.synchronizing import forwards_of
from paralab.doctor.failures.accumulation.windows import (
    ASSUMED,
    Window,
    averaged_by,
    quiet,
    timelines,
    windows,
)
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.facts import If
from paralab.doctor.static.project import Module, Scope, dotted_key
from paralab.doctor.static.report import at, code, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import Event

ENTRY = Entry(
    id="G04",
    title="An optimizer step on gradients that were not synchronized",
    symptom="No message. The parameters of the ranks drift apart and never become equal again.",
    cause="The last pass before the step also runs under `no_sync()`, or the data ends in the middle of a window.",
    fix="Synchronize in the last pass before every step, and in the last batch of the epoch.",
    example="""\
- with model.no_sync():
-     loss = criterion(model(x), y)
-     loss.backward()
+ loss = criterion(model(x), y)
+ loss.backward()
  optimizer.step()
""",
    silent=True,
)


@check("G04", "G05", source="script")
def never_synchronized(script: Script) -> Iterator[Finding]:
    """Report DDP models that only run forward under `no_sync` (G05: backward is outside)."""
    passes = [
        (event, forwards, next((one for one in events[place:] if one.role == "step"), None))
        for events in timelines(script)
        for place, event in enumerate(events)
        if event.role == "backward" and (forwards := forwards_of(script, event))
    ]
    if not passes or not all(_is_quiet(script, one) for _, many, _ in passes for one in many):
        return
    for event, forwards, step in passes[:1]:
        by = averaged_by(script, step) if step is not None else ""
        if step is None or by == "":
            continue
        severity: Severity = "suspect" if by else "error"
        more = f" Certain if {by} does not average the parameters." if by else ""
        forward, call = forwards[0].call, event.call
        if _is_quiet(script, event):
            why = (
                f"`{code(step.call.node)}` uses gradients that were never synchronized: every forward and backward pass, "
                f"such as {line_of(call, step.call)}, runs under `no_sync`. The ranks drift apart.{more}"
            )
            fix = "Run the last micro-batch before the step outside `no_sync`."
            yield found(script, "G04", severity, step.call, why, fix, also=(call,))
        else:
            why = (
                f"The forward pass `{code(forward.node.func)}(…)` ({line_of(forward, call)}) runs under `no_sync`, backward does "
                f"not. DDP decides in forward, so these gradients are never synchronized and the ranks drift apart.{more}"
            )
            fix = "Keep both together: inside `no_sync`, or, for the last micro-batch before a step, outside."
            yield found(script, "G05", severity, call, why, fix, also=(forward,))


def _is_quiet(script: Script, event: Event) -> bool:
    return any(quiet(script, *block) is True for block in event.blocks())


@check("G04", source="script")
def unsynchronized_boundary(script: Script) -> Iterator[Finding]:
    """Report an iteration that steps although its passes ran under `no_sync`."""
    sure = list(_unsynchronized_boundary(script))
    yield from sure or _another_remainder(script)


def _unsynchronized_boundary(script: Script) -> Iterator[Finding]:
    for window in windows(script):
        forwards = forwards_of(script, window.backward)
        if not forwards or window.guard is None or window.is_apart:
            continue
        if any(one.is_apart and one.loop == window.loop for one in windows(script)):
            continue
        size = window.number or ASSUMED
        known = window.length is not None and window.length >= size  # else it spans epochs
        for length in [window.length or 0] if known else [2 * size, 2 * size + 1]:
            turn = _unsynchronized_turn(window, forwards[0], length)
            if turn is None or averaged_by(script, window.step) == "":
                continue
            partial = turn == length - 1 and length % size != 0
            which = (
                "after the last batch, before its window is full"
                if partial
                else f"after micro-batch {turn + 1}"
            )
            step = window.step.call
            why = (
                f"`{code(step.node)}` runs {which}, but the forward pass of that micro-batch "
                f"({line_of(forwards[0].call, step)}) is still under `no_sync`: its gradients are not synchronized."
            )
            if partial:
                why += " Certain if the number of batches is not a multiple of the window."
            fix = "Use one condition for both: `no_sync` exactly when no step follows."
            severity: Severity = "suspect" if partial else "error"
            yield found(script, "G04", severity, step, why, fix, also=(forwards[0].call,))
            break


def _unsynchronized_turn(window: Window, forward: Event, length: int) -> int | None:
    for turn in range(length):
        env = window.env(turn, length)
        quiet_here = [window.is_quiet(one, env) for one in (forward, window.backward)]
        if quiet_here == [True, True] and window.happens(window.step, env) is True:
            return turn
    return None


@check("G04", source="script")
def always_quiet(script: Script) -> Iterator[Finding]:
    """Report `no_sync` under `i != n` in a loop over `range(n)`, where it is always true."""
    for module in script.modules:
        for node in module.nodes:
            if not isinstance(node, ast.Attribute) or node.attr != "no_sync":
                continue
            scope = module.scope_of(node)
            for item in script.context(node, module):
                test = (
                    _always_true(script, item.test, scope)
                    if isinstance(item, If) and item.taken
                    else None
                )
                if test is not None:
                    why = (
                        f"`{code(test)}` is always true, so the last micro-batch before the step runs under `no_sync` too: "
                        "its gradients are never synchronized."
                    )
                    fix = f"Compare with the last iteration: `{code(test)} - 1`."
                    yield found(script, "G04", "error", at(test, scope), why, fix)


def _another_remainder(script: Script) -> Iterator[Finding]:
    """Suspect `no_sync` while `i % n != 0` before a step when `(i + 1) % n == 0`."""
    for module in script.modules:
        for node in module.nodes if "no_sync" in module.text else ():
            if not isinstance(node, ast.Attribute) or node.attr != "no_sync":
                continue
            quiet_when = _remainders(script, node, module)
            for step in [call for call in script.methods("step") if call.module is module]:
                others = _remainders(script, step.node, module)
                for one, two in ((one, two) for one in quiet_when for two in others):
                    if _counters(one) == _counters(two) and code(one.left) != code(two.left):
                        why = (
                            f"`no_sync` depends on `{code(one)}`, but the step ({line_of(step, at(node, module.scope))}) on "
                            f"`{code(two)}`. Certain if both count the same backward passes."
                        )
                        fix = "Use one condition for both: `no_sync` exactly when no step follows."
                        yield found(
                            script, "G04", "suspect", at(node, module.scope), why, fix, also=(step,)
                        )
                        return


def _remainders(script: Script, node: ast.AST, module: Module) -> list[ast.BinOp]:
    """Return the `i % n` expressions in the tests around a node."""
    tests = [one.test for one in script.context(node, module) if isinstance(one, If)]
    parts = [part for test in tests for part in ast.walk(test)]
    return [part for part in parts if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod)]


def _counters(remainder: ast.BinOp) -> set[str]:
    """Return the last part of each name in `i % n`."""
    names = (dotted_key(part) for part in ast.walk(remainder))
    return {name.rpartition(".")[2] for name in names if name} - {"self", "args"}


def _always_true(script: Script, test: ast.expr, scope: Scope) -> ast.expr | None:
    """Return a test `i != n` or `i < n` whose `i` comes from `range(n)`."""
    for part in ast.walk(test):
        match part:
            case ast.Compare(ast.Name() as counter, [ast.NotEq() | ast.Lt()], [limit]):
                for one in script.reaching(counter, scope):
                    match one.value:
                        case ast.Call(ast.Name("range"), [stop]) if ast.dump(stop) == ast.dump(
                            limit
                        ):
                            return part
    return None
