"""What FSDP gathers as one: sub-modules that hold a good part of the parameters, and keep them to
themselves.

A unit's parameters are whole only while it is called, so it must be called once, and nothing may
use them outside that call: not another module (tied weights), and not a parent's forward
(`F.linear(x, self.embedding.weight)`). One run of the forward shows it.

    GPT(embedding, blocks = ModuleList(b0, b1, … b11), norm, head)      units: embedding, b0 … b11, head; norm is too small
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paralab.workload.batch import call_model, tensors
from paralab.workload.summary import Unit

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
SMALL = 0.1  # of the largest sibling: less is not worth a collective of its own


class _Uses(TorchFunctionMode):
    """Which sub-modules are called how often, and whose parameters are used while they are not
    being called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.used_outside: set[str] = set()
        self._inside: list[str] = []
        self._holders: dict[int, set[str]] = {}  # by parameter: every sub-module that it is in
        for name, module in model.named_modules(remove_duplicate=False):
            for parameter in module.parameters() if name else ():
                self._holders.setdefault(id(parameter), set()).add(name)
        places: dict[int, list[str]] = {}
        for place, parameter in model.named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), []).append(place)
        for (
            key,
            found,
        ) in (
            places.items()
        ):  # tied weights: only a module that has all places of a parameter keeps it to itself
            tied = {
                name
                for name in self._holders.get(key, ())
                if not all(place.startswith(f"{name}.") for place in found)
            }
            self.used_outside |= tied

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if next(tensors(result), None) is not None:  # a size or a type may be asked for at any time
            for tensor in tensors((args, kwargs or {})):
                self.used_outside |= self._holders.get(id(tensor), set()).difference(self._inside)
        return result

    def entering(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.calls[name] += 1
            self._inside.append(name)

        return hook

    def leaving(self, *_: Any) -> None:
        self._inside.pop()


@torch.no_grad()
def find_units(model: nn.Module, inputs: Any) -> tuple[Unit, ...]:
    """The units, in the order of the model's modules; what they do not hold stays with the whole
    model."""
    uses = _Uses(model)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.callback(module.register_forward_pre_hook(uses.entering(name)).remove)
                hooks.callback(module.register_forward_hook(uses.leaving).remove)
        with uses:
            call_model(model, inputs)
    half = _held(model) / 2
    modules = dict(model.named_modules())

    def among(parent: str) -> Iterator[Unit]:
        children = [
            (f"{parent}.{name}" if parent else name, child)
            for name, child in modules[parent].named_children()
        ]
        largest = max((_held(child) for _, child in children), default=0)
        for name, child in children:
            held = _held(child)
            if name not in modules or not held or held < SMALL * largest:
                continue
            deeper = isinstance(child, CONTAINERS) or held > half or not uses.calls[name]
            if deeper and any(_held(grandchild) for grandchild in child.children()):
                yield from among(name)
            elif uses.calls[name] == 1 and name not in uses.used_outside:
                yield Unit(name, held)

    return tuple(among(""))


def _held(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
