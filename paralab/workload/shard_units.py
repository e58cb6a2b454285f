"""Find FSDP units: submodules that have a large share of the parameters and are the only users of
those parameters.

A unit's parameters are gathered only while the unit is called. So it must be called exactly once,
and no other code may use its parameters: neither another module (tied weights) nor a parent's
forward (`F.linear(x, self.embedding.weight)`). Calling the model once detects such uses.

    GPT(embedding, blocks = ModuleList(b0, b1, … b11), norm, head)
    units: embedding, b0 … b11, head      (norm is too small)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from paralab.workload.batch import call_model, copied, tensors
from paralab.workload.hooks import watched
from paralab.workload.summary import Unit

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
SMALL = 0.1  # a unit smaller than this fraction of its largest sibling is not worth a collective


class ParameterUse(TorchFunctionMode):
    """Counts submodule calls, and finds parameters that are used outside their submodule."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.used_outside: set[str] = set()
        self.users: dict[int, set[str]] = {}  # id of a parameter -> innermost submodules
        self._inside = [""]  # the model itself, and the submodules whose calls have not ended
        self._owners: dict[int, set[str]] = {}  # parameter -> all submodules with it
        places: dict[int, list[set[str]]] = {}  # tied weights have multiple names
        for place, parameter in model.named_parameters(remove_duplicate=False):
            names = accumulate(place.split(".")[:-1], "{}.{}".format)
            places.setdefault(id(parameter), []).append(set(names))
        for key, occurrences in places.items():
            self._owners[key] = set().union(*occurrences)
            self.used_outside |= self._owners[key] - occurrences[0].intersection(*occurrences)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if next(tensors(result), None) is not None:  # reading a size or dtype is not a use
            for tensor in tensors((args, kwargs or {})):
                if id(tensor) in self._owners:
                    self.users.setdefault(id(tensor), set()).add(self._inside[-1])
                    self.used_outside |= self._owners[id(tensor)].difference(self._inside)
        return result

    def enter(self, name: str, arguments: Any) -> None:
        self.calls[name] += 1
        self._inside.append(name)

    def leave(self, name: str, output: Any) -> None:
        self._inside.pop()


def find_units(model: nn.Module, inputs: Any) -> tuple[Unit, ...]:
    """Find the units, in the model's order. The root module gets all other parameters."""
    use = ParameterUse(model)
    with watched(model, use.enter, use.leave), use:
        call_model(model, copied(inputs))

    half = _num_bytes(model) / 2
    modules = dict(model.named_modules())

    def search(parent: str) -> Iterator[Unit]:
        prefix = f"{parent}." if parent else ""
        children = [(prefix + name, child) for name, child in modules[parent].named_children()]
        largest = max((_num_bytes(child) for _, child in children), default=0)
        for name, child in children:
            size = _num_bytes(child)
            if name not in modules or not size or size < SMALL * largest:
                continue
            deeper = isinstance(child, CONTAINERS) or size > half or not use.calls[name]
            if deeper and any(_num_bytes(grandchild) for grandchild in child.children()):
                yield from search(name)
            elif use.calls[name] == 1 and name not in use.used_outside:
                yield Unit(name, size)

    return tuple(search(""))


def _num_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
