"""Find the device that an expression names, and the calls that move a model there."""

import ast

from paralab.doctor.static.facts import Call
from paralab.doctor.static.project import Scope
from paralab.doctor.static.script import Script


def fixed_device(script: Script, node: ast.expr | None, scope: Scope) -> str | None:
    """Return a device such as `cuda:0` if the script shows that it is the same on every rank."""
    if node is None:
        return None
    makers = script.makers(node, scope) or (
        [script.call_at[node]] if node in script.call_at else []
    )
    if makers:
        made = makers[0]
        if len(makers) > 1 or made.target != "torch.device" or len(made.node.args) != 1:
            return None
        return fixed_device(script, made.node.args[0], made.scope)
    values = {script.evaluate(node, scope, rank) for rank in (0, 1)}
    value = values.pop() if len(values) == 1 else None
    if isinstance(value, int) and not isinstance(value, bool):
        return f"cuda:{value}"
    return value if isinstance(value, str) and value.startswith("cuda") else None


def moves(script: Script) -> list[Call]:
    """Return the calls that may move a model to a device, excluding moves of inputs and tensors."""
    return [
        call
        for call in script.methods("to", "cuda", "xpu", "to_empty")
        if call.receiver is not None
        and script.kinds(call.receiver, call.scope).isdisjoint({"batch", "loss", "output"})
    ]


def destination(script: Script, move: Call) -> str | None:
    """Return the destination of a move: `cuda` for the current GPU, or None if it is unknown."""
    device = move.argument(0, "device")
    if device is None:
        return "cuda" if move.method == "cuda" else None
    return fixed_device(script, device, move.scope)


def hides_gpus(script: Script) -> bool:
    """Return whether the script sets CUDA_VISIBLE_DEVICES itself."""
    return "CUDA_VISIBLE_DEVICES" in script.strings


def relies_on_one_gpu(script: Script) -> bool:
    """Return whether the script uses the current GPU by name and never chooses one, as if each rank
    saw only its own (`srun --gpus-per-task=1`)."""
    current = script.calls_of("torch.cuda.current_device")
    return bool(current) and not script.methods("set_device")
