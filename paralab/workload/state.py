"""State that a forward may change in its model: buffers, plain attributes, and generators.

Examples are running statistics, a counter, or a warm-up schedule. The next call to such a forward
returns a different result. Splitting a batch changes how often the forward is called, and with how
many samples, so such a model trains differently.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import torch
from torch import nn

State = dict[tuple[str, str], Any]  # (module, attribute) -> value
OWN = set(vars(nn.Module())) | {"training"}  # attributes of all modules
PLAIN = (bool, int, float, complex, str, bytes, type(None))
MOST_ITEMS = 1000  # ignore a larger container: it is not a counter, and copying it is slow


def state_of(model: nn.Module) -> State:
    """Copy all model state that a forward may change, except parameters."""
    copies: dict[int, torch.Tensor] = {}  # by id, so a tensor with two names is copied once
    state: State = {}
    for name, module in model.named_modules():
        buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None}
        attributes = {key: value for key, value in vars(module).items() if key not in OWN}
        for key, value in (buffers | attributes).items():
            if _is_state(value):
                state[name, key] = _copy(value, copies)
    return state


def changes(before: State, after: State) -> list[str]:
    """Return the names of the entries that differ."""
    places = dict.fromkeys([*before, *after])
    return [
        ".".join(filter(None, place))
        for place in places
        if not _same(before.get(place, _MISSING), after.get(place, _MISSING))
    ]


def put_back(model: nn.Module, state: State) -> None:
    """Restore these values, in new buffers: a graph may still need the old ones."""
    modules = dict(model.named_modules())
    copies: dict[int, torch.Tensor] = {}
    for (name, key), value in state.items():
        module: Any = modules[name]
        owner = module._buffers if key in module._buffers else vars(module)
        present = owner.get(key)
        if isinstance(value, _GeneratorState):
            value.put_back(present)
            continue
        if key in module._buffers and present is not None and present.is_meta:
            continue  # this buffer belongs to a stage in another process
        new = _copy(value, copies)
        if isinstance(present, torch.Tensor) and isinstance(new, torch.Tensor):
            new = copies[id(value)] = new.to(present.device)  # the model may have a new device
        owner[key] = new


_MISSING = object()


class _GeneratorState:
    def __init__(self, generator: Any) -> None:
        is_torch = isinstance(generator, torch.Generator)
        self.value: Any = generator.get_state() if is_torch else generator.getstate()

    def put_back(self, generator: Any) -> None:
        is_torch = isinstance(generator, torch.Generator)
        (generator.set_state if is_torch else generator.setstate)(self.value)


def _is_state(value: Any) -> bool:
    if isinstance(value, list | tuple | set | deque):
        return len(value) <= MOST_ITEMS and all(map(_is_state, value))
    if isinstance(value, dict):
        return len(value) <= MOST_ITEMS and all(map(_is_state, value.values()))
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter) and not value.is_meta
    return isinstance(value, (*PLAIN, torch.Generator, random.Random))


def _copy(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return copies.setdefault(id(value), value.detach().clone())
    if isinstance(value, torch.Generator | random.Random):
        return _GeneratorState(value)
    if isinstance(value, dict):
        new = copy.copy(value)  # a Counter or defaultdict keeps its type
        dict.update(new, {key: _copy(item, copies) for key, item in value.items()})
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_copy(item, copies) for item in value))
    if isinstance(value, deque):
        return deque((_copy(item, copies) for item in value), value.maxlen)
    if isinstance(value, list | tuple | set):
        return type(value)(_copy(item, copies) for item in value)
    return value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and torch.equal(one.nan_to_num(), other.nan_to_num())
    if type(one) is not type(other):
        return False
    if isinstance(one, _GeneratorState):
        return _same(one.value, other.value)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other))
