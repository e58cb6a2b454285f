"""The layers and buffers of a model, if the script shows them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.static.facts import SAME_VALUE, Call, If, With
from paralab.doctor.static.names import DDP, sounds_like
from paralab.doctor.static.project import Scope
from paralab.doctor.static.script import Script

# torchvision and timm models with BatchNorm, by the start of their names.
_WITH_BATCH_NORM = (
    "resnet", "resnext", "wide_resnet", "densenet", "mobilenet", "efficientnet", "shufflenet",
    "inception", "googlenet", "mnasnet", "regnet", "vgg11_bn", "vgg16_bn", "vgg19_bn",
)  # fmt: skip


def wraps(script: Script) -> list[Call]:
    """Return the calls that wrap a model in DDP."""
    return script.calls_of(DDP)


def wrapped_by(script: Script, model: ast.expr, scope: Scope) -> Call | None:
    """Return the DDP call that made a value, if there is exactly one candidate."""
    makers = [call for call in script.makers(model, scope) if call.target == DDP]
    if makers:
        return makers[0]
    every = wraps(script)
    return every[0] if len(every) == 1 else None


def option(script: Script, call: Call, name: str) -> bool | None:
    """Return whether a call turns an option on, or None if that is unknown."""
    value, scope = call.argument(99, name), call.scope
    for keyword in call.node.keywords:
        if keyword.arg is None and value is None:  # `**options`
            options = [one.value for one in script.reaching(keyword.value, scope)]
            if not options or not isinstance(options[-1], ast.Dict):
                return None
            pairs = zip(options[-1].keys, options[-1].values, strict=True)
            value = next((v for k, v in pairs if getattr(k, "value", None) == name), None)
    if value is None:
        return False
    truths = {script.truth(value, scope, rank) for rank in (0, 1)}
    return truths.pop() if len(truths) == 1 else None


def is_without_grad(script: Script, call: Call) -> bool:
    """Return whether a call runs under `torch.no_grad()`, as a block or a decorator."""
    if any(script.is_kind(one.item, call.scope, "no_grad") for one in call.inside(With)):
        return True
    return not {"no_grad", "inference_mode"}.isdisjoint(call.scope.decorators)


def is_decided(script: Script, call: Call) -> bool:
    """Return whether every enclosing condition of a call is known. Ignore early exits such as
    `if args.help: return`, because the rest of the function assumes that they are false."""
    return all(
        None not in [script.truth(one.test, call.scope, rank) for rank in (0, 1)]
        for one in call.inside(If)
        if not one.exits
    )


def classes(script: Script, model: ast.expr | None, scope: Scope) -> set[Scope]:
    """Return the project classes that a model is made of."""
    waiting = [call.made for call in script.makers(model, scope) if call.made is not None]
    found: set[Scope] = set()
    while waiting:
        owner = waiting.pop()
        if owner not in found:
            found.add(owner)
            inside = script.calls_in_class(owner)
            waiting.extend(one.made for one in inside if one.made is not None)
    return found


def layers(
    script: Script, model: ast.expr | None, scope: Scope, depth: int = 0
) -> Iterator[Call | None]:
    """Yield the calls that create a model's layers, and None for each unknown part."""
    if model is None or depth > 8:
        yield None
        return
    makers = list(script.makers(model, scope))
    if not makers:
        yield None
    for call in makers:
        if call.made is not None:
            yield from _layers_of_class(script, call.made, depth)
        elif call.target.startswith("torch.nn."):
            yield call
            for argument in call.node.args:
                inner = argument.value if isinstance(argument, ast.Starred) else argument
                if isinstance(inner, (ast.Call, ast.Name, ast.Attribute)) and not (
                    call.target.rpartition(".")[2][:1].isupper()
                    and script.kinds(inner, call.scope).isdisjoint({"module"})
                ):
                    yield from layers(script, inner, call.scope, depth + 1)
                elif isinstance(inner, (ast.List, ast.Tuple)):
                    for one in inner.elts:
                        yield from layers(script, one, call.scope, depth + 1)
        elif call.method in SAME_VALUE or call.target == "torch.compile":
            yield from layers(script, call.argument(0, "model"), call.scope, depth + 1)
        else:
            yield call


def _layers_of_class(script: Script, owner: Scope, depth: int) -> Iterator[Call | None]:
    for one in script.ancestors(owner):
        if not isinstance(one, Scope):
            if not one.startswith("torch.nn.") and one != "builtins.object":
                yield None
            continue
        for call in script.calls_in_class(one):
            last = call.target.rpartition(".")[2]
            layer = call.target.startswith("torch.nn.") and last[:1].isupper()
            if layer or call.method == "register_buffer":
                yield call
            elif call.made not in (None, owner) and script.is_a(call.made, "Module") and depth < 6:
                yield from _layers_of_class(script, call.made, depth + 1)
            elif _builds_module(script, call) and depth < 6:
                for value in call.function.returns if call.function else []:
                    yield from layers(script, value, call.function or one, depth + 1)
        yield from (None for _ in _foreign_parts(script, one))


def _builds_module(script: Script, call: Call) -> bool:
    """Return whether a call runs a project function that returns a module: `block(3, 8)`."""
    known = call.function is not None and call.made is None
    return known and script.kinds(call.node, call.scope) == {"module"}


def _foreign_parts(script: Script, owner: Scope) -> Iterator[object]:
    """Yield parts that come from outside the class: `self.encoder = encoder`."""
    for scope in owner.module.scopes_by_class[owner]:
        stored = [
            one for key, all_ in scope.definitions.items() if key[:5] == "self." for one in all_
        ]
        for definition in stored:
            value = definition.value
            if isinstance(value, ast.Name):
                is_model = sounds_like(value.id) == "module" or "coder" in value.id
                if is_model or script.is_kind(value, scope, "module", "ddp"):
                    yield definition
            elif value in script.call_at:
                target = script.call_at[value].target
                is_class = target.rpartition(".")[2][:1].isupper()
                is_foreign = target and not target.startswith(("torch.", "builtins."))
                if is_foreign and (is_class or "model" in target):
                    yield definition


def buffers_of(script: Script, model: ast.expr | None, scope: Scope) -> str | None:
    """Describe a part of a model that has buffers. Return "" if no part has any, and None if that
    is unknown."""
    known = True
    if len({id(call.made or call.target) for call in script.makers(model, scope)}) > 1:
        return None  # any of several calls may make the model
    for call in layers(script, model, scope):
        if call is None:
            known = False
            continue
        last = call.target.rpartition(".")[2] or call.method
        ways = [script.decide(way, call.scope, None) for way in call.inside(If)]
        if any(way is not True for way in ways):
            known = known and False in ways  # this part may not belong to this model
        elif "BatchNorm" in last or last == "register_buffer":
            return f"{last} ({call.module.path.name}:{call.line})"
        if "models" in call.target and last.lower().startswith(_WITH_BATCH_NORM):
            return f"BatchNorm in {last}"
        known = known and call.target.startswith("torch.nn.")
    return "" if known else None
