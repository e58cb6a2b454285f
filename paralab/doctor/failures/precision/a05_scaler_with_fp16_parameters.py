"""A05: GradScaler with fp16 parameters.

Symptom: 'Attempting to unscale FP16 gradients'.
Cause: The parameters are fp16 (`half()`, `torch_dtype=float16`), and so are their gradients. The scaler needs fp32.
Fix: Keep the parameters in fp32, and let autocast convert where it helps.
Reported: huggingface/transformers#23165 pytorch/pytorch#74739

- model = Net().half()
+ model = Net()
  scaler = torch.amp.GradScaler()
"""

from collections.abc import Iterator

from paralab.doctor.failures.precision.scaling import HALF, dtypes, own_steps
from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"Attempting to unscale FP16 gradients",
        "The parameters are float16{at}, so their gradients are too. Unscaling them would lose "
        "the precision that scaling preserved, so GradScaler rejects them.",
    ),
)


@check("A05", source="script")
def half_parameters(script: Script) -> Findings:
    """Report a model in fp16 whose parameters belong to the scaler's optimizer."""
    for step in own_steps(script):
        models = {m for call in _parameters(script, step.call) for m in _makers(script, call)}
        if any(models & set(_makers(script, call)) for call in script.methods("float")):
            continue  # `float()` converts the model back
        for call in script.methods("half", "to", "from_pretrained"):
            same = {call} if call.method == "from_pretrained" else set(_makers(script, call))
            tests = [script.decide(one, call.scope, None) for one in call.inside(If)]
            if not models & same or False in tests or not _to_half(script, call):
                continue
            why = (
                f"`{code(call.node)}` makes the parameters and their gradients fp16, so "
                f"`{code(step.call.node)}` ({line_of(step.call, call)}) raises a ValueError."
            )
            doubt = "if this line runs" if None in tests else ""
            yield found(script, "A05", "error", call, why, doubt=doubt, also=(step.call,))


def _parameters(script: Script, step: Call) -> Iterator[Call]:
    """Yield the `model.parameters()` that were passed to the optimizer in
    `scaler.step(optimizer)`."""
    for maker in script.makers(step.argument(0, "optimizer"), step.scope):
        given = maker.argument(0, "params")
        call = script.call_at.get(given) if given is not None else None
        if call is not None and call.method == "parameters":
            yield call


def _makers(script: Script, call: Call) -> list[Call]:
    return script.makers(call.receiver, call.scope)


def _to_half(script: Script, call: Call) -> bool:
    if call.method == "half":
        return not call.node.args
    given = [call.argument(9, "dtype"), call.argument(9, "torch_dtype")]
    given += [*call.node.args] if call.method == "to" else []
    names = [dtypes(script, one, call.scope) for one in given if one is not None]
    return any(one <= HALF for one in names)
