"""Mixed precision in a script: the calls to GradScaler, autocast, and clipping, in order."""

import ast
from collections.abc import Iterator

from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.names import ACCELERATOR, AUTOCAST, SCALER
from paralab.doctor.static.project import Scope
from paralab.doctor.static.script import Script, once_per_script
from paralab.doctor.static.timeline import Event, Timelines, condition, excludes

CLIPS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")
# External calls that leave a scaler unchanged. Any other call may do anything with it.
_HARMLESS = ("builtins.", "torch.", "logging.")
HALF = frozenset({"torch.float16", "torch.half"})


@once_per_script
def timelines(script: Script) -> list[list[Event]]:
    """Return scaler calls, backward, clipping, and optimizer steps in program order."""
    methods = ("scale", "unscale_", "step", "update", "backward", *CLIPS)
    return list(Timelines(script, lambda call: role(script, call), methods).all())


def role(script: Script, call: Call) -> str:
    """Return the role of a call in a step with a scaler, or an empty string."""
    name = call.last_name
    if name in CLIPS:
        handled = script.is_kind(call.receiver, call.scope, "accelerator")
        return "" if handled or call.target.startswith("lightning") else "clip"
    if call.receiver is None:
        return ""
    if name == "backward":
        return "scaled backward" if scaled_by(script, call) is not None else "backward"
    kinds = script.kinds(call.receiver, call.scope)
    if name == "step" and "optimizer" in kinds and "scaler" not in kinds:
        return "optimizer step"
    return name if "scaler" in kinds and "accelerator" not in kinds else ""


def scaled_by(script: Script, backward: Call) -> Call | None:
    """Return the `scaler.scale(…)` on whose result backward is called."""
    value: ast.expr | None = backward.receiver
    for definition in script.reaching(value, backward.scope) if value is not None else []:
        if definition.how == "assign":
            value = definition.value
    call = script.call_at.get(value) if value is not None else None
    if call is None or call.method != "scale" or call.receiver is None:
        return None
    return call if script.is_kind(call.receiver, call.scope, "scaler") else None


def name_of(call: Call) -> str:
    """Return `scaler` for `scaler.step(…)`, as the script writes it."""
    return ast.unparse(call.receiver) if call.receiver is not None else "scaler"


def unscale_for(step: Call) -> str:
    """Return `scaler.unscale_(optimizer)`, with the names from `scaler.step(optimizer)`."""
    given = step.argument(0, "optimizer")
    return f"{name_of(step)}.unscale_({ast.unparse(given) if given is not None else 'optimizer'})"


def is_off(script: Script, call: Call) -> bool:
    """Return whether the scaler of this call is definitely disabled."""
    made = [one for one in script.makers(call.receiver, call.scope) if one.target == SCALER]
    return bool(made) and all(enabled(script, maker) is False for maker in made)


def enabled(script: Script, maker: Call) -> bool | None:
    """Return whether `GradScaler(enabled=…)` or `autocast(enabled=…)` is on, or None if unknown."""
    written = ast.unparse(maker.node.func)
    first = 0 if "cuda" in written and maker.target == AUTOCAST else 99
    given = maker.argument(first, "enabled")
    if given is None:
        return None if maker.unpacks else True
    return evaluate_condition(script, given, maker.scope)


def evaluate_condition(script: Script, test: ast.expr, scope: Scope) -> bool | None:
    """Return whether a condition is true, or None if unknown. `dtype is torch.float16` is known if
    the dtype is."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.Eq)):
        one, other = (dtypes(script, part, scope) for part in (test.left, test.comparators[0]))
        if len(one) == len(other) == 1 and "" not in one | other:
            return one == other
    return script.truth(test, scope, 0)


def scaled_before(before: list[Event], event: Event) -> tuple[Event | None, Event | None]:
    """Return the scaled backward pass before an event, and the `unscale_` between the two."""
    plain: list[Event] = []
    unscaled = None
    for earlier in reversed(before):
        if excludes(earlier, event):
            continue
        if earlier.role == "scaled backward":
            alone = all(excludes(one, earlier) for one in plain)
            return (earlier if alone else None), unscaled
        if earlier.role == "unscale_":
            unscaled = unscaled or earlier
        elif earlier.role in ("step", "optimizer step"):
            break
        elif earlier.role == "backward":
            plain.append(earlier)
    return None, unscaled


def calls_on_scaler(script: Script, name: str) -> list[Call]:
    """Return calls to one method of a scaler, or of an unknown object that may be one."""
    found = []
    for call in script.methods(name):
        kinds = script.kinds(call.receiver, call.scope)
        unknown = not kinds and not call.target and not call.function
        if call.receiver is not None and ("scaler" in kinds or unknown):
            found.append(call)
    return found


def own_steps(script: Script) -> list[Event]:
    """Return the `scaler.step` calls, if the project shows all uses of its GradScalers."""
    if not script.calls_of(SCALER) or _escapes(script):
        return []
    steps = {
        event.call: event
        for events in timelines(script)
        for event in events
        if event.role == "step" and not is_off(script, event.call)
    }
    return [event for event in steps.values() if _is_complete(script, event.call)]


def _is_complete(script: Script, call: Call) -> bool:
    """Return whether a call's class and all its base classes are in the project or torch."""
    owner = call.scope.class_around
    if owner is None:
        return True
    known = ("torch.", "builtins.", "abc.")
    names = [one for one in script.ancestors(owner) if isinstance(one, str)]
    written = len(getattr(owner.node, "bases", []))
    return all(one.startswith(known) for one in names) and written == len(script.bases(owner))


def _escapes(script: Script) -> bool:
    """Return whether a scaler is passed to code outside the project."""
    for call in script.calls:
        if call.target.startswith(_HARMLESS) or call.function is not None or call.made is not None:
            continue
        names = [one for one in call.arguments if isinstance(one, (ast.Name, ast.Attribute))]
        if any(script.is_kind(one, call.scope, "scaler") for one in names):
            return True
    return False


def dtypes(
    script: Script, node: ast.expr | None, scope: Scope, seen: frozenset[ast.AST] = frozenset()
) -> set[str]:
    """Return the dtypes that an expression may have; "" stands for an unknown dtype."""
    if node is None or node in seen or len(seen) > 6:
        return {""}
    seen |= {node}
    name = script.resolve(node, scope)
    if isinstance(name, str) and name.startswith("torch."):
        return {name}
    if isinstance(node, ast.IfExp):
        truth = script.truth(node.test, scope, 0)
        ways = [node.body, node.orelse] if truth is None else [node.body if truth else node.orelse]
        return set().union(*(dtypes(script, way, scope, seen) for way in ways))
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
        key = script.evaluate(node.slice, scope, 0)
        pairs = zip(node.value.keys, node.value.values, strict=True)
        chosen = [
            one for given, one in pairs if isinstance(given, ast.Constant) and given.value == key
        ]
        return dtypes(script, chosen[0], scope, seen) if chosen else {""}
    found: set[str] = set()
    for value, where in _values(script, node, scope):
        found |= dtypes(script, value, where, seen)
        if "" in found:
            break  # a single unknown value makes the result unknown
    return found or {""}


def _values(
    script: Script, node: ast.expr, scope: Scope
) -> Iterator[tuple[ast.expr | None, Scope]]:
    for definition in script.reaching(node, scope) if dotted_key(node) else []:
        if definition.how == "parameter":
            given = list(script.arguments_for(definition))
            yield from given
            if not given:
                yield None, scope
        else:
            yield (definition.value if definition.how == "assign" else None), definition.scope


def autocasts_around(script: Script, event: Event) -> Iterator[Call]:
    """Yield the `autocast` calls of with-blocks and decorators around an event, innermost first.
    Skip one that is created in the opposite branch: `if fp16: context = autocast()`."""
    tests = {text: taken for (_, text), taken in event.tests().items()}
    blocks = list(event.blocks())
    scopes = [event.scope_at(event.chain[:depth]) for depth in range(len(event.chain) + 1)]
    for scope in scopes:
        decorators = getattr(scope.node, "decorator_list", [])
        blocks[:0] = [(one, scope.parent or scope) for one in decorators]
    for item, scope in reversed(blocks):
        for call in script.makers(item, scope):
            made = [condition(one) for one in call.inside(If)]
            if any(tests.get(text, taken) != taken for text, taken in made):
                continue
            if call.target in (AUTOCAST, f"{ACCELERATOR}.autocast") or (
                call.method == "autocast" and not call.target
            ):
                yield call
