"""D01: The loss comes back as a vector.

Symptom: 'Was asked to gather along dimension 0, but all input tensors were scalars', then 'grad can
be implicitly created only …'.
Cause: The model computes the loss itself, so DataParallel returns one per GPU. backward needs a single number.
Fix: Average over the GPUs first: `loss.mean().backward()`.
Reported: Lightning-AI/pytorch-lightning#249 pytorch/pytorch#9811 #7956 airsplay/lxmert#17

  model = nn.DataParallel(net_that_returns_its_loss)
- loss = model(x, y)
+ loss = model(x, y).mean()
  loss.backward()
"""

import ast

from paralab.doctor.failures.dataparallel.replicas import classes_in, gpus_of, wrapper_of
from paralab.doctor.registry import Findings, Message, check, describe, note
from paralab.doctor.static.facts import Call
from paralab.doctor.static.report import code, found, line_of, replace
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"grad can be implicitly created only for scalar outputs",
        "The DataParallel model computes the loss itself, so every GPU returns one, and "
        "backward(){at} gets a vector.",
        beside=r"Was asked to gather along dimension 0, but all input tensors were scalars",
    ),
    note(
        r"Was asked to gather along dimension 0, but all input tensors were scalars",
        "The DataParallel model computes the loss itself, so every GPU returns one, and the "
        "script gets a vector.",
        severity="warning",
    ),
)


@check("D01", source="script")
def vector_loss(script: Script) -> Findings:
    """Report a backward pass that starts from a DataParallel model's output."""
    for call in script.methods("backward"):
        if not isinstance(call.receiver, ast.Name):
            continue
        for definition in script.reaching(call.receiver, call.scope):
            forward = script.call_at.get(definition.value) if definition.value else None
            wrap = wrapper_of(script, forward.node.func, forward.scope) if forward else None
            if forward is None or wrap is None or gpus_of(script, wrap) == 1:
                continue
            why = (
                f"`{code(forward.node)}` ({line_of(forward, call)}) computes the loss inside the model, so "
                "DataParallel returns one loss per GPU, and `backward` needs a single number."
            )
            sure = _returns_loss(script, wrap, definition.index)
            doubt = "" if sure else "if the model returns a loss and there are several GPUs"
            edits = replace(script, call.module, call.receiver, f"{call.receiver.id}.mean()")
            also = (forward, wrap)
            yield found(script, "D01", "error", call, why, doubt=doubt, also=also, edits=edits)
            break


def _returns_loss(script: Script, wrap: Call, index: int | None) -> bool:
    for owner in classes_in(script, wrap):
        forward = script.method(owner, "forward")
        for value in forward.returns if forward is not None else []:
            if index is not None and isinstance(value, ast.Tuple) and index < len(value.elts):
                value = value.elts[index]
            if forward is not None and script.is_kind(value, forward, "loss"):
                return True
    return False
