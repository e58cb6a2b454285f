"""H07: Only rank 0 validates through the DDP wrapper.

Symptom: A hang or crash during validation if the model has buffers (BatchNorm). NCCL shows OpType=BROADCAST.
Cause: DDP's forward broadcasts the buffers from rank 0, even in eval mode and under no_grad, but only rank 0 calls it.
Fix: Validate on all ranks, or call `model.module` in rank 0's branch.
Reported: pytorch/pytorch#53979 #137268 LibreYOLO/libreyolo#594 huggingface/accelerate#3861

  if dist.get_rank() == 0:
      with torch.no_grad():
-         predicted = model(x)
+         predicted = model.module(x)
"""

import re

from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.facts import Call, is_constant
from paralab.doctor.static.hints import is_for_one_rank, words_of_project
from paralab.doctor.static.models import buffers_of, is_without_grad, wrapped_by, wraps
from paralab.doctor.static.report import code, found
from paralab.doctor.static.script import Script
from paralab.doctor.static.ways import guard_of

ENTRY = describe(__doc__)


@check("H07", source="script")
def forward_by_name(script: Script) -> Findings:
    """Flag validation through the DDP wrapper if the names in its conditions suggest that only
    the main process runs it."""
    for name in ("broadcast_buffers", "forward_sync_buffers"):
        if any(is_constant(one.argument(99, name), False) for one in wraps(script)):
            return
    reported = set()
    in_ddp = "DistributedDataParallel" in words_of_project(script)
    for call in script.calls:
        kinds = script.kinds(call.node.func, call.scope)
        if "ddp" not in kinds and not (in_ddp and kinds == {"module"} and _is_given(script, call)):
            continue
        if call.scope in reported or not is_without_grad(script, call):
            continue
        wrap = wrapped_by(script, call.node.func, call.scope)
        if wrap and buffers_of(script, wrap.argument(0, "module"), wrap.scope) == "":
            continue  # every layer is known, and none has buffers
        if may_be_unwrapped(script, call):
            continue
        guard = guard_of(script, call, lambda one, _: is_for_one_rank(one.test, one.taken), 2)
        if guard is not None:
            reported.add(call.scope)
            why = f"Only one rank calls `{code(call.node.func)}` here (`{code(guard[0].test)}`). DDP's forward pass broadcasts the buffers to all ranks."
            doubt = "if this is the wrapper, not the model inside, and the model has buffers"
            yield found(script, "H07", "suspect", call, why, doubt=doubt)


def may_be_unwrapped(script: Script, call: Call) -> bool:
    """Return whether the called model comes from `model.module` or `unwrap_model(model)`."""
    parts = script.ingredients(call.node.func, call.scope)
    return any(re.search("^module$|unwrap", getattr(one, "attr", "")) for one, _ in parts)


def _is_given(script: Script, call: Call) -> bool:
    """Return whether the model is an argument of a function that no known code calls."""
    definitions = script.reaching(call.node.func, call.scope)
    return not script.callers(call.scope) and [one.how for one in definitions] == ["parameter"]
