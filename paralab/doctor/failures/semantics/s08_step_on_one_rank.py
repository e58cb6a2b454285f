"""S08: Only rank 0 takes the optimizer step. Replicas that drift for other reasons also get this
id.

Symptom: No error. Rank 0 learns; the other ranks keep their initial weights and send outdated gradients.
Cause: DDP synchronizes gradients, not parameters. Every rank must apply the same step.
Fix: Step on every rank, and keep only printing and saving in the branch.

  loss.backward()
- if dist.get_rank() == 0:
-     optimizer.step()
+ optimizer.step()
"""

import ast
from functools import partial

from paralab.doctor.failures.semantics.by_hand import gradient_reductions
from paralab.doctor.failures.semantics.drift import find_cause
from paralab.doctor.failures.semantics.order import runs_later
from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.models import wraps
from paralab.doctor.static.project import Scope
from paralab.doctor.static.report import code, found, out_of_branch
from paralab.doctor.static.script import Script
from paralab.doctor.static.ways import guard_of

ENTRY = describe(__doc__, silent=True)


@check("S08", source="script")
def step_on_some_ranks(script: Script) -> Findings:
    """Report an optimizer step in a branch that only some ranks take."""
    steps = [*script.methods_on("optimizer", "step"), *script.methods_on("scaler", "step")]
    if not wraps(script) or not steps or gradient_reductions(script, "broadcast"):
        return
    for call in steps:
        guard, scope = guard_of(script, call, partial(_parts, script)) or (None, call.scope)
        if guard is None or any(_in_other_branch(guard, other) for other in steps):
            continue
        others = [one for one in call.inside(If) if not script.differs(one.test, call.scope)]
        roles = bool(getattr(guard.node, "orelse", [])) or not guard.taken
        sure = not roles and all(script.nature(one.test, call.scope) == "same" for one in others)
        zero = script.truth(guard.test, scope, 0) == guard.taken
        why = (
            f"Only {'rank 0 takes' if zero else 'the ranks other than 0 take'} this step "
            f"(`{code(guard.test)}`). The others keep their old weights, so the models silently differ."
        )
        doubt = "" if sure else "if all ranks train this model"
        edits = out_of_branch(script, call, guard.node)
        yield found(script, "S08", "error", call, why, doubt=doubt, edits=edits)


@check("S08", source="script")
def load_on_some_ranks(script: Script) -> Findings:
    """Report weights that only some ranks load into a DDP model, which nothing sends to the
    others."""
    if gradient_reductions(script, "broadcast", "broadcast_object_list"):
        return
    for call in script.methods("load_state_dict"):
        model = call.receiver
        if isinstance(model, ast.Attribute) and model.attr == "module":
            model = model.value
        guard, _ = guard_of(script, call, partial(_parts, script)) or (None, None)
        if guard is None or script.kinds(model or call.node, call.scope) != {"ddp"}:
            continue
        if not runs_later(script, script.methods("backward"), (call.node, call.scope)):
            continue  # the model of rank 0 is only evaluated
        why = (
            f"Only some ranks load these weights (`{code(guard.test)}`) into a model that DDP has already made "
            "equal on all ranks. Its parameters differ from here on."
        )
        fix = "Load before `DistributedDataParallel(…)`, which copies rank 0's weights, or on every rank."
        both = getattr(guard.node, "orelse", [])
        doubt = "if the other ranks do not load the same" if both else ""
        yield found(script, "S08", "error", call, why, fix, doubt=doubt)


def _parts(script: Script, test: If, scope: Scope) -> bool:
    return not test.exits and script.differs(test.test, scope)


def _in_other_branch(guard: If, step: Call) -> bool:
    """Return whether the other branch of the `if` also takes a step."""
    node = guard.node
    other = (node.orelse if guard.taken else node.body) if isinstance(node, ast.If) else []
    return any(part is step.node for statement in other for part in ast.walk(statement))


check("S08", "S06", "S07", "S11", "S12", "G04", "G05", "P06", source="ranks")(find_cause)
