"""What a model is made of, as far as the script tells: its layers, and what belongs to it.

A module of the script holds what its methods have stored in it; a container of the library what it
was given.
"""

from __future__ import annotations

from paralab.doctor.script.naming import DDP
from paralab.doctor.script.questions import origins, roles
from paralab.doctor.script.reading import Script
from paralab.doctor.script.remembering import remembered
from paralab.doctor.script.values import Attr, Call, Choice, Constant, Made, Object, Value, options

_NORMS = (
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
)
_NO_WEIGHTS = frozenset(
    word
    for line in (
        "Sequential ModuleList ModuleDict Identity Flatten Unflatten Dropout Dropout1d Dropout2d Dropout3d ReLU ReLU6 LeakyReLU",
        "ELU GELU SiLU Mish Tanh Hardtanh Sigmoid Softmax LogSoftmax Softplus PixelShuffle Upsample MaxPool1d MaxPool2d AvgPool1d",
        "AvgPool2d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveMaxPool2d",
    )
    for word in line.split()
)


_LEADS_TO_PARTS = frozenset(
    [
        "parameters",
        "named_parameters",
        "modules",
        "named_modules",
        "children",
        "named_children",
        "get_submodule",
        "get_parameter",
        "values",
        "items",
        "list",
        "tuple",
        "chain",
        "enumerate",
        "filter",
        "zip",
        "reversed",
        "iter",
        "next",
        "getattr",
    ]
)


def parts(script: Script, module: Value | None) -> dict[int, Value]:
    """The module and all that belongs to it, by identity."""
    held = _held(script)
    found: dict[int, Value] = {}
    waiting = [module] if module else []
    while waiting:
        value = waiting.pop()
        if id(value) in found:
            continue
        found[id(value)] = value
        if isinstance(value, Choice):
            waiting.extend(value.options)
        elif isinstance(value, Object) or "module" in roles(value) or _is_list(value):
            waiting.extend(held.get(id(value), []))
            waiting.extend(value.parents if not isinstance(value, Object) else ())
    return found


@remembered
def _held(script: Script) -> dict[int, list[Value]]:
    """What was stored in each value, by its identity."""
    held: dict[int, list[Value]] = {}
    for store in script.stores:
        for owner in options(store.base):
            held.setdefault(id(owner), []).append(store.value)
    return held


def _is_list(value: Value) -> bool:
    """What is given to a container: a list, a dict, a comprehension, a generator."""
    return type(value).__name__ in ("Items", "Mapping", "Computed", "Generated", "Value")


def layers(script: Script, module: Value | None) -> list[Call]:
    """The library's layers in a module, in program order."""
    made = [
        value.call
        for value in parts(script, module).values()
        if isinstance(value, Made) and "module" in roles(value)
    ]
    return sorted(made, key=lambda call: call.number)


def kind(layer: Call) -> str:
    return layer.target.rpartition(".")[2]


def batch_norms(script: Script, module: Value | None) -> list[Call]:
    return [layer for layer in layers(script, module) if kind(layer) in _NORMS]


def has_buffers(script: Script, module: Value | None) -> str | None:
    """The first thing in a module that is a buffer, in words."""
    norm = next(iter(batch_norms(script, module)), None)
    if norm:
        return f"{kind(norm)} in line {norm.line}"
    inside = parts(script, module)
    registered = (call for call in script.methods("register_buffer") if call.receiver is not None)
    own = next(
        (
            call
            for call in registered
            if any(id(option) in inside for option in options(call.receiver or Value()))
        ),
        None,
    )
    return f"register_buffer in line {own.line}" if own else None


def is_known(script: Script, module: Value | None) -> bool:
    """Is all that belongs to the module seen: layers of torch and modules of the script, and
    nothing else that is made?"""
    made = (value for value in parts(script, module).values() if isinstance(value, Made | Attr))
    return all("module" in roles(value) for value in made)


def has_weights(value: Value) -> bool:
    """Certainly a module with parameters of its own."""
    if not isinstance(value, Made) or "module" not in roles(value):
        return False
    return kind(value.call) not in _NO_WEIGHTS and kind(value.call)[:1].isupper()


def wrappings(script: Script) -> list[tuple[Call, Value]]:
    """The DDP calls, each with the module that it wraps."""
    found = ((call, call.argument(0, "module")) for call in script.calls_of(DDP))
    return [(call, module) for call, module in found if module is not None]


def is_wrapper(value: Value | None) -> bool:
    """A DDP model on every way that it may have come."""
    ways = list(options(value)) if value else []
    return bool(ways) and all("ddp" in roles(way) for way in ways)


def inside_wrapper(value: Value | None) -> Call | None:
    """`ddp.module`: the DDP call behind it."""
    for way in options(value) if value else ():
        if isinstance(way, Attr) and way.name == "module":
            for base in options(way.base):
                if isinstance(base, Made) and base.call.target == DDP:
                    return base.call
    return None


def belongs(script: Script, value: Value, module: Value | None, wrapping: Call) -> bool:
    """Is a parameter (or a part) computed from this module, from its wrapper, or from something in
    it?"""
    inside = parts(script, module)

    def further(v: Value) -> bool:  # a gradient or an output of the model is not a part of it
        if isinstance(v, Attr):
            return v.name == "grad"
        if isinstance(
            v, Object
        ):  # what it was made with (sizes, options) may be in the other model, too
            return True
        return (
            isinstance(v, Made) and v.call is not wrapping and v.call.method not in _LEADS_TO_PARTS
        )

    found = origins(value, further)
    return any(
        id(origin) in inside or (isinstance(origin, Made) and origin.call is wrapping)
        for origin in found
    )


def is_copy(value: Value) -> bool:
    """Made by a deep copy of what the call has made."""
    if isinstance(value, Object):
        return value.made is None or value.made.result is not value
    return isinstance(value, Made) and value.call.result is not value


def is_off(value: Value | None) -> bool:
    return isinstance(value, Constant) and value.value is False


def is_on(value: Value | None) -> bool:
    return isinstance(value, Constant) and value.value is True
