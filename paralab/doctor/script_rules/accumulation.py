"""Gradient accumulation under DDP: are gradients exchanged once per window, and always before the
step?"""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding, Severity
from paralab.doctor.registry import check
from paralab.doctor.script.exchanging import exchanges_by_hand, given_away
from paralab.doctor.script.order import loops_apart
from paralab.doctor.script.pointing import called, found, place
from paralab.doctor.script.questions import roles, under
from paralab.doctor.script.reading import Script
from paralab.doctor.script.turns import happens, is_under
from paralab.doctor.script.updates import Backward, Window, backwards, steps, windows
from paralab.doctor.script.values import (
    Attr,
    Call,
    Made,
    Parameter,
    Value,
    With,
    options,
)

# --- G02, G03: exchanged more often than needed
# ----------------------------------------------------------------------------------


@check("G02", source="script")
def exchange_in_every_turn(script: Script) -> Iterator[Finding]:
    if any(store.name == "require_backward_grad_sync" for store in script.stores):
        return
    for window in windows(script):
        backward = window.backward
        calls = (backward.call, *backward.wrapped)
        if (
            window.number == 1
            or not backward.wrapped
            or _in_unknown_block(calls)
            or _quiet_sibling(script, window)
        ):
            continue
        number = f"{window.number}" if window.number else f"`{window.size_text or 'n'}`"
        model = called(backward.wrapped[0])
        why = (
            f"`{called(window.step)}()` in line {window.step.line} needs the sum over {number} backward calls, but each of them "
            f"exchanges the gradients of `{model}` with the other ranks: {number} all-reduces per step where one would do."
        )
        fix = f"Run all but the last forward and backward of a window in `with {model}.no_sync():`."
        yield found(script, "G02", "warning", backward.call, why, fix, also=(window.step,))


def _quiet_sibling(script: Script, window: Window) -> bool:
    """In no_sync itself, or the same work stands twice in the loop, once with and once without
    no_sync."""
    inside = (backward for backward in backwards(script) if window.loop in backward.call.context)
    return any(
        under(call, "no_sync") for backward in inside for call in (backward.call, *backward.wrapped)
    )


def _in_unknown_block(calls: tuple[Call, ...]) -> bool:
    """A with-block whose manager is not known may well be no_sync."""

    def unknown(value: Value) -> bool:
        if isinstance(value, Made):
            return value.call.target.startswith("?")
        return type(value) is Value or isinstance(value, Parameter | Attr)

    managers = (
        manager for call in calls for block in call.inside(With) for manager in block.managers
    )
    return any(unknown(option) for manager in managers for option in options(manager))


@check("G03", source="script")
def no_sync_around_backward_only(script: Script) -> Iterator[Finding]:
    for backward in backwards(script):
        block = under(backward.call, "no_sync")
        if (
            block is None
            or not backward.wrapped
            or any(under(call, "no_sync") for call in backward.wrapped)
        ):
            continue
        forward = backward.wrapped[0]
        if loops_apart(forward, backward.call):
            continue  # it exchanges, but not in every turn: P06
        why = (
            f"`no_sync` is open around `backward` only. DDP decides in the forward, `{called(forward)}(…)` in line {forward.line}, "
            "whether this backward exchanges gradients, so it exchanges them all the same."
        )
        yield found(
            script,
            "G03",
            "warning",
            backward.call,
            why,
            f"Move the forward of line {forward.line} into the block, too.",
            also=(forward,),
        )


# --- G04, G05: a step on gradients that were not exchanged
# -----------------------------------------------------------------------


@check("G05", source="script")
def forward_in_no_sync_only(script: Script) -> Iterator[Finding]:
    for backward in _never_exchanged(script):
        if under(backward.call, "no_sync") is None:
            forward = backward.wrapped[0]
            why = (
                f"The forward `{called(forward)}(…)` in line {forward.line} runs in `no_sync`, the backward does not. DDP decides "
                "in the forward: these gradients are never exchanged, and the ranks' parameters drift apart."
            )
            fix = "Keep forward and backward together: both inside `no_sync`; for the last micro-batch of a window, both outside."
            severity, more = _unless_averaged(script, backward.call)
            yield found(script, "G05", severity, backward.call, why + more, fix, also=(forward,))


def _unless_averaged(script: Script, at: Call) -> tuple[Severity, str]:
    away = given_away(script)
    if away is None:
        return "error", ""
    return (
        "suspect",
        f" Certain if `{called(away)}` ({place(away, at)}) does not average the parameters.",
    )


def _never_exchanged(script: Script) -> list[Backward]:
    """Backward calls whose forwards all stand in no_sync, whatever happens, where no other forward
    of the script is outside, and nothing is exchanged by hand."""
    if exchanges_by_hand(script):
        return []
    every = [backward for backward in backwards(script) if backward.wrapped]
    quiet = [
        backward for backward in every if all(_always_quiet(call) for call in backward.wrapped)
    ]
    return quiet if len(quiet) == len(every) and steps(script) else []


def _always_quiet(call: Call) -> bool:
    blocks = [manager for block in call.inside(With) for manager in block.managers]
    return any(all("no_sync" in roles(option) for option in options(manager)) for manager in blocks)


@check("G04", source="script")
def step_without_exchange(script: Script) -> Iterator[Finding]:
    quiet = [backward for backward in _never_exchanged(script) if under(backward.call, "no_sync")]
    if quiet:
        step = next(
            (step for step in steps(script) if step.number > quiet[0].call.number), steps(script)[0]
        )
        why = (
            f"`{called(step)}()` uses gradients that every rank has for itself: all forwards and backwards of the model, among "
            f"them line {quiet[0].call.line}, run in `no_sync`. The ranks' parameters drift apart."
        )
        fix = "Leave the last micro-batch before the step out of `no_sync`."
        severity, more = _unless_averaged(script, step)
        yield found(script, "G04", severity, step, why + more, fix, also=(quiet[0].call,))
        return
    for window in windows(script):
        yield from _unexchanged_boundary(script, window)


def _unexchanged_boundary(script: Script, window: Window) -> Iterator[Finding]:
    backward = window.backward
    if (
        not backward.wrapped
        or window.guard is None
        or _others_outside(script, window)
        or exchanges_by_hand(script)
    ):
        return
    forward = backward.wrapped[0]
    for more in (0, 1):
        for turn in window.turns(more):
            quiet = (
                is_under(forward, "no_sync", turn) is True
                and is_under(backward.call, "no_sync", turn) is True
            )
            if not quiet or happens(window.step, turn) is not True:
                continue
            number, size = turn.index + 1, window.number or f"`{window.size_text or 'n'}`"
            partial = more and turn.index + 1 == turn.length
            which = (
                "after the last batch of the loader, whose window is not full,"
                if partial
                else f"after micro-batch {number}"
            )
            why = (
                f"`{called(window.step)}()` runs {which} (of windows of {size}), and that micro-batch's forward in line "
                f"{forward.line} is still in `no_sync`: the gradients were not exchanged, and the ranks' parameters drift apart."
            )
            if partial:
                why += " Certain if the number of batches is not a multiple of the window."
            fix = "Let the same condition decide both: `no_sync` exactly when no step follows."
            yield found(
                script,
                "G04",
                "suspect" if partial else "error",
                window.step,
                why,
                fix,
                also=(forward,),
            )
            return


def _others_outside(script: Script, window: Window) -> bool:
    """Another backward in the same loop, outside of no_sync: the boundary has its own."""
    own = window.backward.call
    others = (
        backward for backward in backwards(script) if backward.wrapped and backward.call is not own
    )
    return any(window.loop in other.call.context for other in others)
