"""L04: Every rank also uses GPU 0.

Symptom: nvidia-smi shows all processes on GPU 0, and only GPU 0 runs out of memory.
Cause: `.cuda()` or torch.load ran before set_device, or the device number is the global rank instead of the local rank.
Fix: Call `torch.cuda.set_device` with LOCAL_RANK before anything uses a GPU.
Limits: Only the memory use of several GPUs would show it, so the doctor checks only the script.
Reported: pytorch/pytorch#159262

+ torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
  model = Net().cuda()
- torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
"""

import ast

from paralab.doctor.failures.launch.devices import destination, hides_gpus
from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.names import INIT, SET_DEVICE
from paralab.doctor.static.project import position
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script

ENTRY = describe(__doc__)


@check("L04", source="script")
def cuda_before_set_device(script: Script) -> Findings:
    """Report a use of the current GPU before the only set_device, in the same function."""
    chosen = script.calls_of(SET_DEVICE)
    if len(chosen) != 1 or not script.calls_of(INIT) or hides_gpus(script):
        return
    choice = chosen[0]
    for call in script.calls_in(choice.scope):
        if position(call.node) >= position(choice.node):
            return
        if call.method not in ("cuda", "to") or call.receiver is None:
            continue
        tests = [*call.inside(If), *choice.inside(If)]
        always = all(script.decide(one, call.scope, 1) for one in tests)
        if always and destination(script, call) == "cuda":
            why = (
                f"`{code(call.node)}` uses the current GPU before `{code(choice.node)}` ({line_of(choice, call)}) "
                "chooses one, so every rank keeps a few hundred MB on GPU 0."
            )
            yield found(script, "L04", "error", call, why, also=(choice,))
            return


@check("L04", source="script")
def global_rank_as_device(script: Script) -> Findings:
    """Flag a device whose number is the global rank."""
    for call in [*script.calls_of(SET_DEVICE), *script.calls_of("torch.device")]:
        device = call.node.args[-1] if call.node.args else None
        if device is not None and _is_global_rank(script, device, call):
            why = (
                f"`{code(call.node)}` uses the global rank as the number of a GPU on this machine."
            )
            fix = 'Use the local rank: `int(os.environ["LOCAL_RANK"])`.'
            doubt = "with more than one machine: rank 8 has no GPU 8 there"
            yield found(script, "L04", "suspect", call, why, fix, doubt=doubt)
            return


def _is_global_rank(script: Script, device: ast.expr, call: Call) -> bool:
    """Return whether the number comes from RANK or get_rank(), without a local rank or a modulo."""
    parts = [part for part, _ in script.ingredients(device, call.scope, hops=4)]
    text = " ".join(ast.unparse(part) for part in parts if isinstance(part, ast.expr)).lower()
    if "local" in text or any(isinstance(part, (ast.Mod, ast.IfExp)) for part in parts):
        return False
    calls = [script.call_at[part] for part in parts if part in script.call_at]
    return any(one.target == "torch.distributed.get_rank" for one in calls) or any(
        isinstance(part, ast.Constant) and part.value in ("RANK", "SLURM_PROCID") for part in parts
    )
