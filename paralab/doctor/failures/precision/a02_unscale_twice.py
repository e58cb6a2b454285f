"""A02: unscale_ is called twice in one step.

Symptom: 'unscale_() has already been called on this optimizer since the last update()'.
Cause: `unscale_` runs for every micro-batch, or a branch that skips the step also skips `update()`.
Fix: Unscale once per step, right before the step, and call `update()` after every `unscale_`.
Reported: huggingface/accelerate#641 microsoft/Swin-Transformer#311 Haian-Jin/LVSM#19 huggingface/transformers#24840

  for x, y in micro_batches:
      scaler.scale(criterion(model(x), y) / N).backward()
-     scaler.unscale_(optimizer)
+ scaler.unscale_(optimizer)
  scaler.step(optimizer)
  scaler.update()
"""

import ast

from paralab.doctor.failures.accumulation.windows import modulo_in
from paralab.doctor.failures.precision.scaling import timelines
from paralab.doctor.registry import Finding, Findings, Message, check, describe
from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.facts import If
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import (
    Chain,
    Event,
    condition,
    excludes,
    extra_tests,
    occurrences,
)

ENTRY = describe(
    __doc__,
    Message(
        r"unscale_\(\) has already been called on this optimizer since the last update",
        "{who} called scaler.unscale_ twice before scaler.update(){at}. Gradients are unscaled "
        "once per optimizer step, and an earlier micro-batch already unscaled them.",
    ),
)


@check("A02", source="script")
def unscaled_twice(script: Script) -> Findings:
    """Report a second `unscale_` before `update()`, in the same step or the next iteration."""
    for events, place, one in occurrences(timelines(script), "unscale_"):
        second = _second(script, events[place + 1 :], one)
        if second is None:
            yield from _without_update(script, events, one)
            continue
        why = (
            f"`{code(second.call.node)}` follows `{code(one.call.node)}` "
            f"({line_of(one.call, second.call)}) without `update()` in between, and raises a RuntimeError."
        )
        sure = not extra_tests(one, second) and not extra_tests(second, one)
        doubt = "" if sure else "if both lines run in one step"
        yield found(script, "A02", "error", second.call, why, doubt=doubt, also=(one.call,))


def _second(script: Script, later: list[Event], one: Event) -> Event | None:
    """Return another `unscale_` of the same optimizer that follows in the same iteration."""
    for event in later:
        if event.role == "update" and not excludes(event, one):
            return None
        again = event.role == "unscale_" and event.call is not one.call
        together = event.loops == one.loops and not excludes(event, one)
        if again and together and _is_same(script, event, one):
            return event
    return None


def _is_same(script: Script, one: Event, other: Event) -> bool:
    given = [event.call.argument(0, "optimizer") for event in (one, other)]
    if given[0] is None or given[1] is None or dotted_key(given[0]) is None:
        return False
    if one.chain == other.chain and one.call.scope is other.call.scope:
        return ast.dump(given[0]) == ast.dump(given[1])
    makers = script.makers(given[0], one.call.scope)
    return len(makers) == 1 and makers == script.makers(given[1], other.call.scope)


def _without_update(script: Script, events: list[Event], one: Event) -> Findings:
    """Report `unscale_` if it runs in every iteration but `update()` runs only in some."""
    given = one.call.argument(0, "optimizer")
    updates = [event for event in events if event.role == "update" and not excludes(event, one)]
    if not updates or given is None or (not one.loops and not one.call.scope.is_function):
        return
    if any(each.how == "item" for each in script.reaching(given, one.call.scope)):
        return  # every iteration has a different optimizer
    inside = [event for event in updates if event.loops[: len(one.loops)] == one.loops]
    steps = [event for event in events if event.role == "step"]
    if not inside and not any(step.loops[: len(one.loops)] == one.loops for step in steps):
        if len(one.loops) > 1 or (one.loops and any(update.loops for update in updates)):
            yield _finding(script, one, updates[0], "only after the loop", True)
        return
    tests = [_unmatched(event, one, updates) for event in inside]
    if tests and all(tests):
        test = tests[0]
        assert test is not None
        scope = inside[0].scope_at(test[0])
        own = extra_tests(one, inside[0])
        if any(modulo_in(script, item.test, one.scope_at(chain)) for chain, item in own):
            return
        often = modulo_in(script, test[1].test, scope) or "isfinite" in ast.unparse(test[1].test)
        when = f"only if `{code(test[1].test)}`"
        yield _finding(script, one, inside[0], when, bool(often and not own))


def _unmatched(update: Event, one: Event, updates: list[Event]) -> tuple[Chain, If] | None:
    """Return a condition of `update()` but not of `unscale_`, if no `update()` runs otherwise."""
    for chain, item in extra_tests(update, one):
        text, taken = condition(item)
        if not any(other.tests().get((chain, text), taken) != taken for other in updates):
            return chain, item
    return None


def _finding(script: Script, one: Event, update: Event, when: str, sure: bool) -> Finding:
    why = (
        f"`{code(one.call.node)}` runs in every iteration, but `update()` ({line_of(update.call, one.call)}) "
        f"runs {when}. Without it, the next `unscale_` raises a RuntimeError."
    )
    doubt = "" if sure else "if that condition is ever false here"
    return found(script, "A02", "error", one.call, why, doubt=doubt, also=(update.call,))
