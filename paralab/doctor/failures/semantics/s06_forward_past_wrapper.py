"""S06: The forward pass bypasses DDP through model.module.

Symptom: No error. Every rank trains a different model, and only rank 0's is saved.
Cause: `model.module(x)` skips DDP.forward, which prepares the synchronization. The gradients are never averaged.
Fix: Call the wrapper: `model(x)`. To run another method, let forward call it.
Reported: jingyaogong/minimind#853 moojink/openvla-oft#160 k2-fsa/icefall#226

  model = DistributedDataParallel(net)
- loss = criterion(model.module(x), y)
+ loss = criterion(model(x), y)
  loss.backward()
"""

import ast

from paralab.doctor.failures.semantics.by_hand import gradient_reductions
from paralab.doctor.failures.semantics.order import runs_later
from paralab.doctor.registry import Edit, Findings, check, describe
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.models import is_decided, is_without_grad, wraps
from paralab.doctor.static.project import Scope, position
from paralab.doctor.static.report import code, found, line_of, replace
from paralab.doctor.static.script import Script

ENTRY = describe(__doc__, silent=True)


@check("S06", source="script")
def forward_past_wrapper(script: Script) -> Findings:
    """Report a loss that comes only from the module inside DDP, not from a call to the wrapper."""
    if gradient_reductions(script):
        return
    seen = set()
    for backward in script.methods("backward"):
        loss = _loss(backward)
        if loss is None or _is_thrown_away(script, backward):
            continue
        calls = script.contributors(loss, backward.scope)
        wrapped = script.calls_to("ddp", calls)
        if any(holds_inner(script, call.node.func, call.scope) is None for call in wrapped):
            continue  # DDP averages the gradients that this backward computes
        for call in calls:
            sure = _is_past(script, call)
            alone = any(script.differs(one.test, call.scope) for one in call.inside(If))
            if sure is None or alone or call in seen or is_without_grad(script, call):
                continue
            seen.add(call)
            sure = sure and is_decided(script, call) and is_decided(script, backward)
            why = (
                f"`{code(call.node.func)}(…)` calls the module inside DDP. DDP.forward does not run, so "
                f"nothing averages the gradients of `{code(backward.node.func)}()` "
                f"({line_of(backward, call)}), and the ranks silently drift apart."
            )
            doubt = "" if sure else "if this line runs in training, on a DDP model"
            edits: tuple[Edit, ...] = ()
            if isinstance(call.node.func, ast.Attribute) and call.method == "module":
                inner = code(call.node.func.value, 500)
                edits = replace(script, call.module, call.node.func, inner)
            also = (backward,)
            yield found(script, "S06", "error", call, why, doubt=doubt, also=also, edits=edits)


@check("S06", source="script")
def discarded_wrapper(script: Script) -> Findings:
    """Report `DDP(model)` without an assignment: the script trains the plain model."""
    if gradient_reductions(script) or not script.methods("backward"):
        return
    for wrap in wraps(script):
        given = wrap.argument(0, "module")
        if given is None or not isinstance(wrap.module.parents.get(wrap.node), ast.Expr):
            continue
        why = (
            f"Nothing keeps the wrapper, and `{code(given)}` is still the plain model. Its forward pass does "
            "not run DDP.forward, so nothing averages the gradients."
        )
        fix = f"Assign it, and train the wrapper: `{code(given)} = {code(wrap.node)}`."
        edits = replace(script, wrap.module, wrap.node, f"{code(given)} = {code(wrap.node, 500)}")
        yield found(script, "S06", "error", wrap, why, fix, edits=edits)


def _loss(backward: Call) -> ast.expr | None:
    given = backward.target.endswith(("autograd.backward", "Accelerator.backward"))
    given = given or "accelerator" in code(backward.receiver).lower()
    return backward.node.args[0] if given and backward.node.args else backward.receiver


def _is_past(script: Script, call: Call) -> bool | None:
    """Return True if a call runs the module inside DDP, False if it may, and None if it does
    not."""
    function = call.node.func
    sure = holds_inner(script, function, call.scope)
    if sure is not None:
        return sure
    if isinstance(function, ast.Attribute) and function.attr not in ("state_dict", "parameters"):
        inner = holds_inner(script, function.value, call.scope)
        if inner is not None and call.function is None:
            return False  # the model comes from elsewhere, so this method may be its forward pass
        if inner and call.function is not None and _computes(script, call.function):
            return inner
    return _is_wrapped_name(script, call)


def holds_inner(script: Script, node: ast.expr, scope: Scope, depth: int = 0) -> bool | None:
    """Return True if a value is the module inside a DDP wrapper, False if it may be, else None."""
    if depth > 6:
        return None
    match node:
        case ast.Attribute(value, "module"):
            kinds = script.kinds(value, scope)
            return "dp" not in kinds if "ddp" in kinds else None
        case ast.Attribute(value, "forward"):
            return holds_inner(script, value, scope, depth + 1)
        case ast.IfExp(_, body, orelse):
            ways = [holds_inner(script, way, scope, depth + 1) for way in (body, orelse)]
            return True if True in ways else False if False in ways else None
        case ast.Call():
            return _unwraps(script, node)
        case ast.Name() | ast.Attribute():
            ways = [
                _unwraps(script, one.value)
                if one.how == "item" and isinstance(one.value, ast.Call)
                else holds_inner(script, one.value, one.scope, depth + 1)
                for one in script.reaching(node, scope)
                if one.how in ("assign", "item") and one.value is not None and one.value is not node
            ]
            return None if set(ways) <= {None} else all(ways)
    return None


def _unwraps(script: Script, node: ast.Call) -> bool | None:
    """Return whether `unwrap(model)`, a project function, returns `….module` of a DDP model."""
    call = script.call_at.get(node)
    if call is None or not any(script.is_kind(one, call.scope, "ddp") for one in node.args):
        return None
    returns = call.function.returns if call.function is not None else []
    parts = [part for value in returns for part in ast.walk(value)]
    return any(isinstance(p, ast.Attribute) and p.attr == "module" for p in parts) or None


def _is_wrapped_name(script: Script, call: Call) -> bool | None:
    """Return whether a call is `plain(x)` after `model = DDP(plain)`."""
    function = call.node.func
    if not isinstance(function, ast.Name):
        return None
    own = script.reaching(function, call.scope)
    for wrap in wraps(script):
        given = wrap.argument(0, "module")
        if not isinstance(given, ast.Name) or (given.id, wrap.scope) != (function.id, call.scope):
            continue
        if own and own == script.reaching(given, wrap.scope) and is_decided(script, wrap):
            return position(call.node) > position(wrap.node) or None
    return None


def _computes(script: Script, method: Scope) -> bool:
    """Return whether a method of a model runs a forward pass of the model or its layers."""
    return any(
        one.method in ("self", "forward") or script.is_kind(one.node.func, one.scope, "module")
        for one in script.reached(method)
    )


def _is_thrown_away(script: Script, backward: Call) -> bool:
    """Return whether no step uses these gradients. Such a script needs only the input's
    gradients."""
    later = [
        call
        for call in script.calls_in(backward.scope)
        if call.method in ("step", "zero_grad") and position(call.node) > position(backward.node)
    ]
    if later:
        return later[0].method == "zero_grad"
    return not runs_later(script, script.methods("step"), (backward.node, backward.scope))
