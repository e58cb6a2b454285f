"""A11: The scaler steps, but the loss was never scaled.

Symptom: 'Attempted step but _scale is None'.
Cause: `loss.backward()` runs without `scaler.scale(…)`.
Fix: Write `scaler.scale(loss).backward()`.

- loss.backward()
+ scaler.scale(loss).backward()
  scaler.step(optimizer)
  scaler.update()
"""

from paralab.doctor.failures.precision.scaling import calls_on_scaler, name_of, own_steps, timelines
from paralab.doctor.registry import Edit, Findings, Message, check, describe
from paralab.doctor.static.facts import Call
from paralab.doctor.static.report import code, found, line_of, replace
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"Attempted (?:step|unscale_) but _scale is None",
        "{who} called the scaler's step{at}, but no loss went through scaler.scale().",
    ),
)


@check("A11", source="script")
def never_scaled(script: Script) -> Findings:
    """Report `scaler.step` in a project that never calls `scaler.scale`."""
    steps = own_steps(script)
    if not steps or calls_on_scaler(script, "scale"):
        return
    step = steps[0].call
    scaler, backward = name_of(step), _backward_before(script, step)
    why = f"Nothing calls `{scaler}.scale(loss)`, so `{code(step.node)}` raises an AssertionError."
    edits: tuple[Edit, ...] = ()
    if backward is not None and backward.receiver is not None:
        why += f" `{code(backward.node)}` ({line_of(backward, step)}) uses the loss without scaling it."
        if backward.scope is step.scope or scaler.startswith("self."):
            text = f"{scaler}.scale({code(backward.receiver, 200)})"
            edits = replace(script, backward.module, backward.receiver, text)
    also = (backward,) if backward is not None else ()
    yield found(script, "A11", "error", step, why, also=also, edits=edits)


def _backward_before(script: Script, step: Call) -> Call | None:
    for events in timelines(script):
        last = None
        for event in events:
            if event.call is step and last is not None:
                return last
            last = event.call if event.role == "backward" else last
    return None
