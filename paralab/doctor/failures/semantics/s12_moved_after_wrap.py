"""S12: The wrapped model moves to the CPU and back.

Symptom: No error. From then on, DDP does not synchronize gradients.
Cause: The move replaces the parameters that DDP has hooks on.
Fix: Copy the tensors of the state_dict to the CPU instead of moving the model, or wrap again.
Limits: On CPU ranks, the move changes nothing, so without a GPU the doctor finds this only in the
script.
Reported: pytorch/pytorch#104336

  model = DistributedDataParallel(net)
- torch.save(model.cpu().module.state_dict(), "net.pt")
- model.cuda()
+ torch.save({name: tensor.cpu() for name, tensor in model.module.state_dict().items()}, "net.pt")
"""

import ast

from paralab.doctor.failures.semantics.by_hand import gradient_reductions
from paralab.doctor.failures.semantics.order import runs_after, runs_later
from paralab.doctor.failures.semantics.s06_forward_past_wrapper import holds_inner
from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.facts import Call, is_constant
from paralab.doctor.static.models import is_decided, wraps
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script

ENTRY = describe(__doc__, silent=True)


@check("S12", source="script")
def moved_to_cpu(script: Script) -> Findings:
    """Report a DDP model that moves to the CPU and is trained again."""
    if not wraps(script) or gradient_reductions(script):
        return
    for call in script.methods("cpu", "to"):
        if not isinstance(call.receiver, (ast.Name, ast.Attribute)):
            continue
        if not (call.method == "cpu" or _is_cpu(call)) or not _is_wrapper(script, call):
            continue
        place = (call.node, call.scope)
        if runs_later(script, wraps(script), place):
            continue  # the script wraps the model again
        trains = [
            (backward, runs_after(script, (backward.node, backward.scope), place))
            for backward in script.methods("backward")
        ]
        again = [backward for backward, order in trains if order & {"after", "loop"}]
        if not again:
            continue
        sure = is_decided(script, call) and "before" not in dict(trains)[again[0]]
        why = (
            f"`{code(call.node)}` replaces the parameters of the DDP model, and "
            f"{line_of(again[0], call)} trains it again. DDP's hooks are on the old parameters, so it "
            "silently stops averaging gradients."
        )
        doubt = "" if sure else "if training continues after this line"
        yield found(script, "S12", "error", call, why, doubt=doubt, also=(again[0],))


def _is_wrapper(script: Script, call: Call) -> bool:
    """Return whether a value is definitely the DDP model or its inner module, and not a copy."""
    assert call.receiver is not None
    if script.kinds(call.receiver, call.scope) == {"ddp"}:
        makers = script.makers(call.receiver, call.scope)
        return all(maker.target.startswith("torch.nn.parallel.") for maker in makers)
    return bool(holds_inner(script, call.receiver, call.scope))


def _is_cpu(call: Call) -> bool:
    given = call.argument(0, "device")
    if isinstance(given, ast.Call) and given.args:  # torch.device("cpu")
        given = given.args[0]
    return is_constant(given, "cpu")
