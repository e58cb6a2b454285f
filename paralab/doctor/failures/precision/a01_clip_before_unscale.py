"""A01: Gradients are clipped while they are still scaled.

Symptom: No error. Almost every step is clipped, and the model barely learns.
Cause: `clip_grad_norm_` runs before `unscale_`, so it clips gradients that are still multiplied by
the loss scale (65536 at first).
Fix: Call `scaler.unscale_(optimizer)` before clipping.
Reported: milesial/Pytorch-UNet#470

  scaler.scale(loss).backward()
+ scaler.unscale_(optimizer)
  clip_grad_norm_(model.parameters(), 1.0)
  scaler.step(optimizer)
  scaler.update()
"""

from paralab.doctor.events import Amp, Clip
from paralab.doctor.failures.precision.scaling import (
    CLIPS,
    is_off,
    name_of,
    role,
    scaled_before,
    timelines,
    unscale_for,
)
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.doctor.static.facts import Call
from paralab.doctor.static.report import code, found, insert_line, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import Event, excludes

ENTRY = describe(__doc__, silent=True)


@check("A01", source="script")
def clipped_before_unscale(script: Script) -> Findings:
    """Report clipping that every path reaches before `scaler.step` and without `unscale_`."""
    steps: dict[Call, Event | None] = {}
    for events in timelines(script):
        for place, clip in enumerate(events):
            if clip.role == "clip" and steps.get(clip.call, clip) is not None:
                step = _step_after(events[place + 1 :], clip)
                if step is not None and not is_off(script, step.call):
                    steps[clip.call] = step if _is_scaled(events[:place], clip) else None
    scales = any(role(script, call) == "scale" for call in script.methods("scale"))
    for clip_call, step in steps.items() if scales else ():
        if step is None:
            continue
        why = (
            f"`{code(clip_call.node.func)}` clips gradients that are still multiplied by the loss "
            f"scale: nothing unscales them before `{name_of(step.call)}.step` "
            f"({line_of(step.call, clip_call)}). Clipping therefore shrinks every step to almost "
            "nothing."
        )
        unscale = unscale_for(step.call)
        near = step.call.scope is clip_call.scope
        edits = insert_line(script, clip_call, unscale) if near else ()
        fix = f"Call `{unscale}` before clipping."
        others = [one for one in script.methods("unscale_") if one.scope is not clip_call.scope]
        doubt = (
            f"if `unscale_` ({line_of(others[0], clip_call)}) does not run first" if others else ""
        )
        also = (step.call,)
        yield found(
            script, "A01", "error", clip_call, why, fix, doubt=doubt, also=also, edits=edits
        )
    if not scales or not any(steps.values()):
        yield from _by_name(script)


def _by_name(script: Script) -> Findings:
    """Flag clipping in a project that scales losses and never calls `unscale_`."""
    others = ("accelerator", "fsdp")
    clips = [c for c in script.methods(*CLIPS) if not script.is_kind(c.receiver, c.scope, *others)]
    scales = script.methods_on("scaler", "scale") or script.methods_on("scaler", "step")
    if clips and scales and not any("unscale_" in module.text for module in script.modules):
        why = f"{line_of(scales[0], clips[0]).capitalize()} uses a scaled loss, and nothing unscales the gradients clipped here."
        doubt = "if both lines run in the same step"
        yield found(script, "A01", "suspect", clips[0], why, doubt=doubt, also=(scales[0],))


def _step_after(events: list[Event], clip: Event) -> Event | None:
    """Return the `scaler.step` that uses the clipped gradients."""
    for event in events:
        if "backward" in event.role and not excludes(event, clip):
            return None
        if event.role == "step" and not excludes(event, clip):
            return event
    return None


def _is_scaled(before: list[Event], clip: Event) -> bool:
    """Return whether the gradients come from a scaled loss and nothing has unscaled them."""
    scaled, unscaled = scaled_before(before, clip)
    others = [one for one in before if one.role == "backward" and not excludes(one, clip)]
    return unscaled is None and (scaled is not None or not others)


@check_each_rank("A01")
def clipped_while_scaled(rank: WatchedRank) -> Finding | None:
    scale: float | None = None  # scale of the current gradients
    for event in rank.events:
        if isinstance(event, Amp):
            scale = event.scale_after(scale)
        elif isinstance(event, Clip) and scale is not None:
            factor = f"{scale:g} times too large" if scale else "still scaled"
            norm = f"norm {event.norm:.4g}, " if event.norm is not None else ""
            why = (
                f"The gradients clipped here are {factor} ({norm}limit {event.most:g}). After "
                "unscaling, the step is close to zero."
            )
            return make_finding("A01", "error", why, event)
    return None
