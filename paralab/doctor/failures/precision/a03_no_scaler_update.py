"""A03: scaler.update() is missing.

Symptom: 'step() has already been called since the last update()'.
Cause: `scaler.step()` runs twice without a `scaler.update()` in between.
Fix: Call `scaler.update()` after every `scaler.step()`.

  scaler.scale(loss).backward()
  scaler.step(optimizer)
+ scaler.update()
"""

from paralab.doctor.failures.precision.scaling import calls_on_scaler, name_of, own_steps
from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.report import code, found, insert_line
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"step\(\) has already been called since the last update"
        r"|unscale_\(\) is being called after step",
        "{who} used the scaler again{at} without scaler.update() after the last scaler.step().",
    ),
)


@check("A03", source="script")
def never_updated(script: Script) -> Findings:
    """Report `scaler.step` in a loop if the project never calls `update()`."""
    steps = [event for event in own_steps(script) if event.loops]
    if not steps or calls_on_scaler(script, "update"):
        return
    call = steps[0].call
    update = f"{name_of(call)}.update()"
    why = f"Nothing calls `{update}`, so the second `{code(call.node)}` raises a RuntimeError."
    edits = insert_line(script, call, update, after=True)
    yield found(script, "A03", "error", call, why, edits=edits)
