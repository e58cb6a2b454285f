"""Model state that a forward pass may change: buffers, plain attributes, and generators.

Examples are running statistics, a counter, or a warm-up schedule. Such state changes the result of
the next forward pass. Splitting a batch changes the number of forward passes, and the number of
samples in each, so such a model trains differently.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction

State = dict[tuple[str, str], Any]  # (module, attribute) -> value
OWN = set(vars(nn.Module())) | {"training"}  # attributes of all modules
PLAIN = (bool, int, float, complex, str, bytes, type(None))
MOST_ITEMS = 1000  # ignore larger containers, which are not counters and are slow to copy


def state_of(model: nn.Module) -> State:
    """Copy all model state that a forward pass may change, except parameters."""
    copies: dict[int, Any] = {}  # tensor id -> copy, because a tensor may have two names
    state: State = {}
    for name, module in model.named_modules():
        attributes = {key: value for key, value in vars(module).items() if key not in OWN}
        for key, value in (module._buffers | attributes).items():
            if _is_state(value):
                state[name, key] = _copy(value, copies)
    return state


def copy_of(model: nn.Module) -> nn.Module:
    """Copy a model, including tensors that have a graph, which deepcopy rejects (an activation, or
    a weight that torch.nn.utils.weight_norm computed)."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    kept = [v for v in attributes if isinstance(v, torch.Tensor) and not v.is_leaf]
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in kept})


def changes(before: State, after: State) -> list[str]:
    """Return the names of the entries that differ."""
    places = dict.fromkeys([*before, *after])
    return [".".join(filter(None, place)) for place in places if not _same(before, after, place)]


def put_back(model: nn.Module, state: State) -> None:
    """Restore these values in new buffers, because a graph may still need the old ones."""
    modules = dict(model.named_modules())
    copies: dict[int, Any] = {}
    for (name, key), value in state.items():
        module: Any = modules[name]
        owner = module._buffers if key in module._buffers else vars(module)
        present = owner.get(key)
        if isinstance(value, torch.Generator):
            present.set_state(value.get_state())
            continue
        if isinstance(value, random.Random):
            present.setstate(value.getstate())
            continue
        if key in module._buffers and present is not None and present.is_meta:
            continue  # this buffer belongs to a stage in another process
        new = _copy(value, copies)
        if isinstance(present, torch.Tensor) and isinstance(new, torch.Tensor):
            new = copies[id(value)] = new.to(present.device)  # the model may have a new device
        owner[key] = new


@contextmanager
def restored(model: nn.Module, state: State | None = None) -> Iterator[State]:
    """Restore this state after the context, and delete attributes that were created in it."""
    state = state_of(model) if state is None else state
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    try:
        yield state
    finally:
        with DisableTorchFunction():  # a function mode may run these operations on meta tensors
            put_back(model, state)
        for name, module in model.named_modules():
            for key in [
                key for key in vars(module) if key not in attributes.get(name, vars(module))
            ]:
                delattr(module, key)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested containers. Also yield each container's length, and each dict's
    keys as 1-tuples."""
    if not isinstance(value, list | tuple | set | deque | dict):
        yield value
        return
    yield len(value)
    if isinstance(value, dict):
        yield from zip(value)
        value = value.values()
    for item in sorted(value, key=repr) if isinstance(value, set) else value:
        yield from _leaves(item)


def _is_state(value: Any) -> bool:
    leaves = list(islice(_leaves(value), MOST_ITEMS + 1))
    return len(leaves) <= MOST_ITEMS and all(
        isinstance(leaf, (*PLAIN, tuple, torch.Tensor, torch.Generator, random.Random))
        and not isinstance(leaf, nn.Parameter)
        and not (isinstance(leaf, torch.Tensor) and leaf.is_meta)
        for leaf in leaves
    )


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    for leaf in _leaves(value):
        if isinstance(leaf, torch.Tensor):  # deepcopy rejects a tensor that has a graph
            copies.setdefault(id(leaf), leaf.detach().clone())
        elif isinstance(leaf, tuple):  # do not copy dict keys, which may be modules
            copies[id(leaf[0])] = leaf[0]
    return copy.deepcopy(value, copies)


def _same(before: State, after: State, place: tuple[str, str]) -> bool:
    """Return whether an entry exists in both states with the same value."""
    if place not in before or place not in after or type(before[place]) is not type(after[place]):
        return False
    one, other = list(_leaves(before[place])), list(_leaves(after[place]))
    return len(one) == len(other) and all(map(_same_leaf, one, other))


def _same_leaf(one: Any, other: Any) -> Any:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, random.Random):
        return one.getstate() == other.getstate()
    return bool(one == other or (one != one and other != other))
