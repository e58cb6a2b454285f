"""A05: GradScaler with fp16 parameters."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.failures.precision.observed import failed_call
from paralab.doctor.failures.precision.scaling import HALF, dtypes, own_steps
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.observation import Observation
from paralab.doctor.registry import Entry, Message, check
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script

ENTRY = Entry(
    id="A05",
    title="GradScaler with fp16 parameters",
    symptom="'Attempting to unscale FP16 gradients'.",
    cause="The model itself is in fp16 (`half()`, `torch_dtype=float16`), so its gradients are fp16 too. The scaler needs fp32 gradients.",
    fix="Keep the parameters in fp32 and let autocast choose.",
    example="""\
- model = Net().half()
+ model = Net()
  scaler = torch.amp.GradScaler()
""",
    sources=("huggingface/transformers#23165", "pytorch/pytorch#74739"),
    messages=(
        Message(
            r"Attempting to unscale FP16 gradients",
            "The parameters are float16{at}, so their gradients are too. Unscaling them would lose "
            "the precision that scaling preserved, so GradScaler refuses.",
        ),
    ),
)


@check("A05", source="script")
def half_parameters(script: Script) -> Iterator[Finding]:
    """Report a model in fp16 whose parameters belong to the scaler's optimizer."""
    reported = set()
    for step in own_steps(script):
        models = {
            maker for call in _parameters(script, step.call) for maker in _makers(script, call)
        }
        for call in script.methods("half", "to", "from_pretrained"):
            if call in reported or not _to_half(script, call):
                continue
            same = {call} if call.method == "from_pretrained" else set(_makers(script, call))
            if not models & same or _back_to_float(script, models):
                continue
            reported.add(call)
            tests = [script.decide(one, call.scope, None) for one in call.inside(If)]
            if False in tests:
                continue
            why = (
                f"`{code(call.node)}` makes the parameters and their gradients fp16. "
                f"`{code(step.call.node)}` ({line_of(step.call, call)}) then raises "
                "'Attempting to unscale FP16 gradients'."
            )
            fix = "Keep the parameters in fp32; autocast converts where it helps."
            severity: Severity = "suspect" if None in tests else "error"
            yield found(script, "A05", severity, call, why, fix, also=(step.call,))


def _parameters(script: Script, step: Call) -> Iterator[Call]:
    """Yield the `model.parameters()` that the optimizer of `scaler.step(optimizer)` was given."""
    optimizer = step.argument(0, "optimizer")
    for maker in script.makers(optimizer, step.scope) if optimizer is not None else []:
        given = maker.argument(0, "params")
        call = script.call_at.get(given) if given is not None else None
        if call is not None and call.method == "parameters":
            yield call


def _makers(script: Script, call: Call) -> list[Call]:
    return script.makers(call.receiver, call.scope) if call.receiver is not None else []


def _to_half(script: Script, call: Call) -> bool:
    if call.method == "half":
        return not call.node.args
    given = [call.argument(9, "dtype"), call.argument(9, "torch_dtype")]
    given += [*call.node.args] if call.method == "to" else []
    names = [dtypes(script, one, call.scope) for one in given if one is not None]
    return any(one <= HALF for one in names)


def _back_to_float(script: Script, models: set[Call]) -> bool:
    return any(models & set(_makers(script, call)) for call in script.methods("float"))


@check("A05", source="ranks")
def unscaled_half(seen: Observation) -> Iterator[Finding]:
    why = "The scaler can only unscale fp32 gradients, but these parameters are fp16 (`model.half()`, or loaded that way)."
    yield from failed_call(seen, "A05", ("unscale_", "step"), "unscale FP16 gradients", why)
