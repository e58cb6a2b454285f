"""A03: scaler.update() is missing."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.failures.precision.observed import failed_call
from paralab.doctor.failures.precision.scaling import calls_on_scaler, name_of, own_steps
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation
from paralab.doctor.registry import Entry, Message, check
from paralab.doctor.static.report import code, found, insert_line
from paralab.doctor.static.script import Script

ENTRY = Entry(
    id="A03",
    title="scaler.update() is missing",
    symptom="'step() has already been called since the last update()'.",
    cause="`scaler.step()` runs twice, and no `scaler.update()` in between prepares the scaler for the next step.",
    fix="Call `scaler.update()` after every `scaler.step()`.",
    example="""\
  scaler.scale(loss).backward()
  scaler.step(optimizer)
+ scaler.update()
""",
    messages=(
        Message(
            r"step\(\) has already been called since the last update"
            r"|unscale_\(\) is being called after step",
            "{who} used the scaler again{at} without scaler.update() after the last scaler.step().",
        ),
    ),
)


@check("A03", source="script")
def never_updated(script: Script) -> Iterator[Finding]:
    """Report `scaler.step` in a loop if the project never calls `update()`."""
    steps = [event for event in own_steps(script) if event.loops]
    if not steps or calls_on_scaler(script, "update"):
        return
    call = steps[0].call
    update = f"{name_of(call)}.update()"
    why = f"`{update}` is never called, so the second `{code(call.node)}` raises a RuntimeError."
    fix = f"Call `{update}` after `{code(call.node)}`."
    edits = insert_line(script, call, update, after=True)
    yield found(script, "A03", "error", call, why, fix, edits=edits)


@check("A03", source="ranks")
def stepped_again(seen: Observation) -> Iterator[Finding]:
    why = "`scaler.step()` runs a second time without `scaler.update()` in between."
    yield from failed_call(seen, "A03", ("step",), r"step\(\) has already been called", why)
