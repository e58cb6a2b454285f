"""A04: optimizer.step() on scaled gradients.

Symptom: With `update()`: 'No inf checks were recorded prior to update'. Without that message, steps
are silently 65536 times too large, or weights become NaN after the first overflow.
Cause: Only `scaler.step()` unscales the gradients and skips a step whose gradients overflowed.
`optimizer.step()` uses the scaled gradients directly.
Fix: Call `scaler.step(optimizer)`.

  scaler.scale(loss).backward()
- optimizer.step()
+ scaler.step(optimizer)
  scaler.update()
"""

import math
from collections.abc import Iterator

from paralab.doctor.events import Amp, Backward, Event, Step
from paralab.doctor.failures.precision.scaling import (
    calls_on_scaler,
    is_off,
    name_of,
    scaled_before,
    scaled_by,
    timelines,
)
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Edit, Finding, Findings, Message, check, describe
from paralab.doctor.static.facts import Call
from paralab.doctor.static.names import SCALER
from paralab.doctor.static.report import code, found, insert_line, line_of, replace
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import extra_tests, occurrences

ENTRY = describe(
    __doc__,
    Message(
        r"No inf checks were recorded prior to update",
        "{who} called scaler.update(){at}, but no step went through the scaler. The script called "
        "optimizer.step() directly, with gradients that are still multiplied by the scale.",
    ),
    silent=True,
)


@check("A04", source="script")
def stepped_past_the_scaler(script: Script) -> Findings:
    """Report `optimizer.step()` after a scaled backward pass if it bypasses the scaler."""
    for events, place, step in occurrences(timelines(script), "optimizer step"):
        backward, unscaled = scaled_before(events[:place], step)
        scale = scaled_by(script, backward.call) if backward is not None else None
        if step.call.node.args or scale is None or is_off(script, scale):
            continue
        if _through_scaler(script, step.call) or (unscaled and extra_tests(step, unscaled)):
            continue  # the scaler or the script checks for overflows
        yield _finding(script, step.call, scale, unscaled.call if unscaled else None)


def _through_scaler(script: Script, step: Call) -> bool:
    """Return whether the scaler steps this optimizer, or one that may be the same object."""
    makers = set(script.makers(step.receiver, step.scope))
    for other in calls_on_scaler(script, "step"):
        others = set(script.makers(other.argument(0, "optimizer"), other.scope))
        if not makers or not others or makers & others:
            return True
    return False


def _finding(script: Script, step: Call, scale: Call, unscaled: Call | None) -> Finding:
    scaler, optimizer = name_of(scale), name_of(step)
    if unscaled is None:
        why = (
            f"The gradients of `{code(scale.node)}.backward()` ({line_of(scale, step)}) are multiplied by the "
            f"loss scale (65536 at first), and `{optimizer}.step()` uses them without unscaling."
        )
    else:
        why = (
            f"`{code(unscaled.node)}` ({line_of(unscaled, step)}) removes the scale, but `{optimizer}.step()` "
            "does not skip a step whose gradients overflowed: the weights become inf or NaN."
        )
    fix = f"Call `{scaler}.step({optimizer})`, then `{scaler}.update()`."
    doubt = "" if script.calls_of(SCALER) else f"if `{scaler}` is a GradScaler"
    edits: tuple[Edit, ...] = ()
    if scale.scope is step.scope:
        edits = replace(script, step.module, step.node, f"{scaler}.step({optimizer})")
        if edits and not calls_on_scaler(script, "update"):
            edits += insert_line(script, step, f"{scaler}.update()", after=True)
    return found(script, "A04", "error", step, why, fix, doubt=doubt, also=(scale,), edits=edits)


@check_each_rank("A04")
def scaled_step(rank: WatchedRank) -> Finding | None:
    scale: float | None = None  # scale of the current gradients
    for event, inside in _with_scaler(rank):
        if isinstance(event, Amp):
            scale = event.scale_after(scale)
        elif inside or scale is None or not isinstance(event, Step):
            continue
        elif _was_scaled(rank, event):
            factor = f"{scale:g}" if scale else "the loss scale"
            why = (
                f"Step {event.number} bypasses the scaler, although the loss went through `scaler.scale()`. "
                f"It uses gradients that are too large by a factor of {factor}, and does not skip "
                "steps that overflow."
            )
            return make_finding("A04", "error", why, event)
    return None


def _was_scaled(rank: WatchedRank, step: Step) -> bool:
    """Return whether the last backward pass before a step started from a scaled loss."""
    kinds = (Amp, Backward, Step)
    before = [event for event in rank.events if event.t < step.t and isinstance(event, kinds)]
    for event, earlier in zip(reversed(before), reversed(before[:-1]), strict=False):
        if isinstance(event, Backward):
            return isinstance(earlier, Amp) and earlier.op == "scale" and earlier.enabled
        if isinstance(event, Step):
            return False
    return False


def _with_scaler(rank: WatchedRank) -> Iterator[tuple[Event, bool]]:
    """Yield every event, and whether it happened inside `scaler.step()`."""
    until = 0.0
    open_steps = (event.t for event in rank.doing if isinstance(event, Amp) and event.op == "step")
    began = min(open_steps, default=math.inf)
    for event in rank.events:
        if isinstance(event, Amp) and event.op == "step":
            until = event.t + (event.seconds or 0.0)
        yield event, event.t <= until or event.t >= began
