"""Recomputation (activation checkpointing): keep only a block's inputs, and recompute the block in
the backward pass.

    full         keep nothing else
    selective    also keep the outputs of matrix products, convolutions, and attention, which take
                 the longest to compute
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from paralab.workload.sample_draws import replay_draws

MODES = ("full", "selective")
EXPENSIVE = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "mkldnn_linear"),
    *("_scaled_mm", "_scaled_grouped_mm", "_grouped_mm"),
)

MakeContext = Callable[[], AbstractContextManager[Any]]
Watched = tuple[Callable[[Any], None], MakeContext]


def watch_nothing(block: nn.Module) -> Watched:
    """Return a function to call with tensors that `selective` keeps, and a function that creates a
    context for recomputing the block."""
    return lambda kept: None, nullcontext


def watch_within(watched: Watched, around: MakeContext) -> Watched:
    """Return the same functions, but recompute the block also within the context `around`."""
    keep, again = watched

    @contextmanager
    def both() -> Iterator[None]:
        with again(), around():
            yield

    return keep, both


def recompute(
    block: nn.Module, mode: str, watch: Callable[[nn.Module], Watched] = watch_nothing
) -> Callable[[], None]:
    """Recompute this block from now on. Return a function that undoes this.

    Change the class, not the object, because copies of the block must call their own method.
    Recomputation does not run the block's hooks.

    A block may change an argument: for example, it may append to a cache of keys and values. So the
    block is recomputed with a copy from before the change."""
    kind: Any = type(block)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        objects = [each for each in (*args, *kwargs.values()) if _has_attributes(each)]
        earlier: dict[int, Any] = {}  # id of an object -> the object before the call
        places: list[list[int]] = []  # where each argument occurs first: 0 1 1 for q, k, k

        def then(value: Any) -> Any:
            return _copy_object(earlier[id(value)], {}) if id(value) in earlier else value

        def run(kwargs: dict[str, Any], *args: Any) -> Any:
            if not places:
                ids = list(map(id, args))
                places.append(list(map(ids.index, ids)))
            else:
                args = tuple(then(args[place]) for place in places[0])
                kwargs = {name: then(value) for name, value in kwargs.items()}
            earlier.update({id(each): _copy_object(each, {}) for each in objects})
            objects.clear()
            return kind.forward(self, *args, **kwargs)

        contexts = partial(_contexts, mode, partial(watch, self))
        return checkpoint(run, kwargs, *args, use_reentrant=False, context_fn=contexts)

    block.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})

    def undo() -> None:
        block.__class__ = kind

    return undo


def _has_attributes(value: Any) -> bool:
    """Return whether this is an object whose attributes a call may change."""
    return (
        hasattr(value, "__dict__") and not isinstance(value, torch.Tensor) and not callable(value)
    )


def _copy_object(value: Any, copies: dict[int, Any]) -> Any:
    """Copy an object with the objects, lists, and dicts in it, but without its tensors."""
    if id(value) in copies:
        return copies[id(value)]
    if not isinstance(value, list | dict) and not _has_attributes(value):
        return value
    copies[id(value)] = made = copy.copy(value)
    attributes = vars(made) if hasattr(made, "__dict__") else {}
    for container in (made, attributes):
        if isinstance(container, list):
            container[:] = [_copy_object(item, copies) for item in container]
        elif isinstance(container, dict):
            for key, item in list(container.items()):
                container[key] = _copy_object(item, copies)
    return made


def _contexts(mode: str, watch: Callable[[], Watched]) -> tuple[Any, Any]:
    """Return the contexts for computing and for recomputing a block."""
    keep, again = watch()
    first: Any = nullcontext()
    contexts: list[MakeContext] = [_same_random_state(), replay_draws(), again]
    if mode == "selective":

        def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            if not is_expensive(operator):
                return CheckpointPolicy.PREFER_RECOMPUTE
            keep(getattr(context, "op_output", None))
            return CheckpointPolicy.MUST_SAVE

        first, cached = create_selective_checkpoint_contexts(policy)
        contexts.append(lambda: cached)
    return first, _Together(contexts)


def is_expensive(operator: Any) -> bool:
    name = operator._schema.name.removeprefix("aten::") if hasattr(operator, "_schema") else ""
    return name in EXPENSIVE or name.startswith("_scaled_dot_product")


class _Together:
    """Combines multiple contexts into one that can be entered repeatedly. A zero-bubble schedule
    recomputes a block twice: for the gradients of its input and of its weights."""

    def __init__(self, contexts: list[MakeContext]) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in self.contexts:
                stack.enter_context(make())
            self.stack = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self.stack.__exit__(*error)


def python_random_state() -> tuple[Any, Any]:
    """Return the states of Python's and numpy's generators, with numpy's as plain values."""
    numpy: Any = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy else ()
    return random.getstate(), tuple(v.tolist() if hasattr(v, "tolist") else v for v in state)


def _set_python_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1]:
        sys.modules["numpy"].random.set_state(state[1])


def _same_random_state() -> MakeContext:
    """Save the states of Python's and numpy's generators. Inside the returned contexts, they draw
    the same numbers again. torch.utils.checkpoint does this only for torch's generators."""
    state = python_random_state()

    @contextmanager
    def repeat() -> Iterator[None]:
        before = python_random_state()
        _set_python_random_state(state)
        try:
            yield
        finally:
            _set_python_random_state(before)

    return repeat
