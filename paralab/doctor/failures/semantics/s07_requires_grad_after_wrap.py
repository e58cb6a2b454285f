"""S07: requires_grad changes after wrapping.

Symptom: The gradients of parameters unfrozen after wrapping silently differ between ranks.
Parameters frozen after wrapping cause the error of S01.
Cause: DDP decides which parameters to synchronize when it wraps the model.
Fix: Freeze and unfreeze before wrapping, or wrap again and create a new optimizer.
Reported: huggingface/transformers#416 JDAI-CV/fast-reid#178

- model = DistributedDataParallel(net)
  for parameter in net.backbone.parameters():
      parameter.requires_grad = True
+ model = DistributedDataParallel(net)
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from paralab.doctor.failures.semantics.order import runs_later
from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.facts import Call, If, Loop
from paralab.doctor.static.models import option, wraps
from paralab.doctor.static.project import Scope, position
from paralab.doctor.static.report import at, code, found, line_of
from paralab.doctor.static.script import Script

ENTRY = describe(__doc__, silent=True)


@dataclass(frozen=True)
class Change:
    """The statement `target.requires_grad = to`. If `filtered`, it changes only some parameters."""

    node: ast.AST
    scope: Scope
    target: ast.expr
    to: bool
    filtered: bool

    @property
    def name(self) -> str:
        return code(self.target, 200)


@check("S07", source="script")
def requires_grad_after_wrap(script: Script) -> Findings:
    """Report a part of a DDP model that is frozen or unfrozen later in the same function."""
    for wrap in wraps(script):
        near = [change for change in _changes(script) if change.scope is wrap.scope]
        later = [change for change in near if position(change.node) > position(wrap.node)]
        again = max(position(one.node) for one in wraps(script) if one.scope is wrap.scope)
        for change in later:
            toggles = any(one.name == change.name and one.to != change.to for one in later)
            if position(change.node) < again or toggles or not _is_of(script, change, wrap):
                continue
            before = [one for one in near if one not in later and one.name == change.name]
            if runs_later(script, script.methods("backward"), (change.node, change.scope)):
                yield from _judge(script, change, wrap, any(not one.to for one in before))


def _judge(script: Script, change: Change, wrap: Call, frozen: bool) -> Findings:
    where = at(change.node, change.scope)
    target = change.target
    whole = script.is_kind(target, change.scope, "ddp") or code(target).endswith(".module")
    if change.to:
        what = "DDP does not average the gradients of parameters that were frozen when it was created, so every rank trains its own copy."
        sure, doubt = frozen and not change.filtered, "if they were frozen when DDP was created"
    elif whole and not change.filtered:
        return  # without any gradient in the model, DDP does not wait
    elif option(script, wrap, "find_unused_parameters") is not False:
        return
    else:
        what = "DDP still waits for these gradients and raises in the second step after this line."
        sure, doubt = not change.filtered, "if other parameters stay trainable"
    tests = [one for one in script.context(change.node, change.scope.module) if isinstance(one, If)]
    sure = sure and all(script.decide(one, change.scope, None) is not None for one in tests)
    why = f"This changes requires_grad after DDP was created ({line_of(wrap, where)}). {what}"
    yield found(script, "S07", "error", where, why, doubt="" if sure else doubt, also=(wrap,))


def _changes(script: Script) -> Iterator[Change]:
    for call in script.methods("requires_grad_"):
        given = call.argument(0, "requires_grad")
        value = given.value if isinstance(given, ast.Constant) else given is None
        if call.receiver is not None and isinstance(value, bool):
            yield _change(script, call.node, call.scope, call.receiver, value)
    for one in script.attributes["requires_grad"]:
        target = one.node.targets[0] if isinstance(one.node, ast.Assign) else None
        if isinstance(target, ast.Attribute) and isinstance(one.value, ast.Constant):
            yield _change(script, one.node, one.scope, target.value, bool(one.value.value))


def _change(script: Script, node: ast.AST, scope: Scope, target: ast.expr, to: bool) -> Change:
    """Resolve the loop variable of `for p in model.body.parameters():`."""
    context = script.context(node, scope.module)
    for place, loop in enumerate(context):
        items = getattr(loop.node, "iter", None) if isinstance(loop, Loop) else None
        if isinstance(items, ast.Call) and isinstance(items.func, ast.Attribute):
            own = code(target) in code(getattr(loop.node, "target", None)).strip("()").split(", ")
            if own and items.func.attr in ("parameters", "named_parameters"):
                filtered = any(isinstance(one, If) for one in context[place:])
                return Change(node, scope, items.func.value, to, filtered)
    return Change(node, scope, target, to, False)


def _is_of(script: Script, change: Change, wrap: Call) -> bool:
    """Return whether the changed part belongs to the model that this call wraps."""
    given, root = wrap.argument(0, "module"), change.target
    while True:
        if given is not None and code(root, 200) == code(given, 200):
            return True
        if script.is_kind(root, change.scope, "ddp"):
            makers = script.makers(root, change.scope)
            return wrap in makers or (not makers and len(wraps(script)) == 1)
        if not isinstance(root, ast.Attribute):
            return False
        root = root.value
