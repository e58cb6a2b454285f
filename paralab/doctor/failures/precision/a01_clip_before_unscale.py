"""A01: clipping gradients that are still scaled."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.events import Amp, Clip
from paralab.doctor.failures.precision.observed import scale_after
from paralab.doctor.failures.precision.scaling import (
    is_off,
    name_of,
    role,
    scaled_before,
    timelines,
    unscale_for,
)
from paralab.doctor.finding import Finding
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.facts import Call
from paralab.doctor.static.report import code, found, insert_line, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import Event, excludes

ENTRY = Entry(
    id="A01",
    title="Gradients are clipped while they are still scaled",
    symptom="No message. Almost every step is clipped, and the model barely learns.",
    cause=(
        "`clip_grad_norm_` runs between `scale(loss).backward()` and `step()` without `unscale_`. "
        "It gets gradients multiplied by the loss scale (65536 at first)."
    ),
    fix="Call `scaler.unscale_(optimizer)` before clipping.",
    example="""\
  scaler.scale(loss).backward()
+ scaler.unscale_(optimizer)
  clip_grad_norm_(model.parameters(), 1.0)
  scaler.step(optimizer)
  scaler.update()
""",
    sources=("milesial/Pytorch-UNet#470",),
    silent=True,
)


@check("A01", source="script")
def clipped_before_unscale(script: Script) -> Iterator[Finding]:
    """Report clipping before `scaler.step` without `unscale_`, on every path in the project."""
    steps: dict[Call, Event | None] = {}
    for events in timelines(script):
        for place, clip in enumerate(events):
            if clip.role == "clip" and steps.get(clip.call, clip) is not None:
                step = _step_after(events[place + 1 :], clip)
                if step is not None and not is_off(script, step.call):
                    steps[clip.call] = step if _is_scaled(events[:place], clip) else None
    scales = script.methods("scale")
    for clip_call, step in steps.items():
        if step is None or not any(role(script, call) == "scale" for call in scales):
            continue
        scaler, unscale = name_of(step.call), unscale_for(step.call)
        why = (
            f"`{code(clip_call.node.func)}` gets gradients that are still multiplied by the loss "
            f"scale (65536 at first): nothing unscales them before `{scaler}.step` "
            f"({line_of(step.call, clip_call)}). Almost every step is clipped to nearly nothing."
        )
        near = step.call.scope is clip_call.scope
        edits = insert_line(script, clip_call, unscale) if near else ()
        fix = f"Call `{unscale}` before clipping."
        yield found(script, "A01", "error", clip_call, why, fix, also=(step.call,), edits=edits)
    if not any(steps.values()):
        yield from _by_name(script)


def _by_name(script: Script) -> Iterator[Finding]:
    """Suspect clipping in a project that scales losses and never calls `unscale_`."""
    clips = script.methods("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")
    clips = [
        call
        for call in clips
        if not script.is_kind(call.receiver, call.scope, "accelerator", "fsdp")
    ]
    scales = [
        call
        for call in script.methods("scale")
        if script.is_kind(call.receiver, call.scope, "scaler")
    ]
    texts = [module.text for module in script.modules]
    if clips and scales and not any("unscale_" in text for text in texts):
        why = (
            f"Gradients are scaled ({line_of(scales[0], clips[0])}), and nothing calls `unscale_` before this clips "
            "them. Certain if both happen in the same step."
        )
        yield found(script, "A01", "suspect", clips[0], why, ENTRY.fix, also=(scales[0],))


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
            scale = scale_after(event, scale)
        elif isinstance(event, Clip) and scale is not None:
            factor = f"{scale:g} times too large" if scale else "still scaled"
            norm = f" (norm {event.norm:.4g})" if event.norm is not None else ""
            why = (
                f"The gradients clipped here are {factor}{norm}. With a limit of {event.most:g} almost "
                "all of them are cut, and after unscaling almost nothing is left of the step."
            )
            evidence = f"rank {rank.rank}, step {event.step + 1}: scale {scale:g}, norm {event.norm}, limit {event.most}"
            return make_finding("A01", "error", why, event, evidence)
    return None
