"""L08: device_ids for a model on the CPU.

Symptom: 'DistributedDataParallel device_ids and output_device arguments only work with … GPU
modules or CPU modules, but got device_ids …'.
Cause: The model was not moved to the GPU before wrapping, or a GPU script runs on CPU ranks.
Fix: Move the model first (`model.to(device)`). On CPU ranks, leave out device_ids.

- model = DistributedDataParallel(Net(), device_ids=[local_rank])
+ model = DistributedDataParallel(Net().to(local_rank), device_ids=[local_rank])
"""

import ast

from paralab.doctor.failures.launch.devices import moves
from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.models import wraps
from paralab.doctor.static.report import code, found
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"device_ids and output_device arguments only work with .{0,80}but got device_ids "
        r"(?P<ids>\[[^\]]*\])",
        "DDP got device_ids={ids}{at}, but the model's parameters are not on that GPU.",
    ),
)


@check("L08", source="script")
def device_ids_on_cpu(script: Script) -> Findings:
    """Report device_ids in a project that never moves a model to a device."""
    defaults = ("torch.set_default_device", "torch.set_default_tensor_type")
    if moves(script) or script.calls_of(*defaults):
        return
    for wrap in wraps(script):
        devices, model = wrap.argument(1, "device_ids"), wrap.argument(0, "module")
        if not isinstance(devices, ast.List) or not devices.elts or model is None:
            continue
        makers = script.makers(model, wrap.scope)
        known = all(made.made or made.target.startswith("torch.nn.") for made in makers)
        if makers and known and all(_is_on_cpu(script, made.node) for made in makers):
            why = f"`{code(wrap.node)}` names devices, but nothing moves the model from the CPU. DDP rejects this."
            yield found(script, "L08", "error", wrap, why)


def _is_on_cpu(script: Script, made: ast.Call) -> bool:
    """Return whether the script creates the model and its layers without a device."""
    return not any(
        one.arg == "device"
        for call in script.calls
        if call.node is made or call.target.startswith("torch.nn.")
        for one in call.node.keywords
    ) and not script.calls_of("torch.device")
