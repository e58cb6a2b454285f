"""Run the part of the model before a stage: shapes on the meta device, and values on demand.

The user's forward is called as a unit, so Python runs everything before the stage too. This costs
no memory and no arithmetic: all operators run on meta tensors. Values that depend only on the
inputs, not on parameters (a padding mask, a branch `if x.any()`), are computed for real when
needed. Each process has the inputs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._device import _device_constructors

from paralab.workload.batch import map_tensors, map_tree, tensors

# Methods that return a non-tensor that depends on the tensor's values.
VALUES = (
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "equal",
)


class _Source:
    """The real value of a meta tensor, computed when it is needed."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.value = functools.cache(compute)


def _call(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Repeat a call with real values in place of their sources."""
    args, kwargs = map_tree(
        lambda source: source.value(), (args, kwargs), lambda item: isinstance(item, _Source)
    )
    if _changes_in_place(func):
        args = (args[0].clone(), *args[1:])
    if func in _device_constructors() or "device" in kwargs:
        # The model may have read its inputs' device, which is meta here.
        wanted = kwargs.get("device")
        if wanted is None or torch.device(wanted).type == "meta":
            kwargs = kwargs | {"device": device}
    with torch.no_grad(), DisableTorchFunction():
        result = func(*args, **kwargs)
    return args[0] if result is None else result


def _changes_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


class ShapeMode(TorchFunctionMode):
    """Until `begun`, runs all operators on meta tensors. After that, replaces meta tensors with the
    real ones, or raises `refuse(shape)` if another stage computes them."""

    def __init__(
        self, device: torch.device, refuse: Callable[[tuple[int, ...]], Exception]
    ) -> None:
        super().__init__()
        self.device, self.refuse = device, refuse
        self.begun = False
        self.replaced = False  # whether a meta tensor had to be replaced
        # Meta tensor id -> the tensor (keeping it alive reserves the id) and its source.
        self._sources: dict[int, tuple[torch.Tensor, _Source]] = {}

    def know(self, empty: torch.Tensor, value: torch.Tensor) -> None:
        self._sources[id(empty)] = (empty, _Source(lambda: value))

    def leave(self) -> None:
        """Leave the mode if it is still the innermost one."""
        if _get_current_function_mode() is self:
            self.__exit__(None, None, None)

    def real(self, tree: Any, func: Any = None) -> Any:
        """Replace meta tensors in the tree with real tensors."""

        def replace(value: torch.Tensor) -> torch.Tensor:
            if not value.is_meta:
                return value
            if id(value) in self._sources:
                self.replaced = True
                result: torch.Tensor = self._sources[id(value)][1].value()
                return result
            if getattr(func, "__name__", "") == "__get__":  # a shape or a type
                return value
            raise self.refuse(tuple(value.shape))

        return map_tensors(replace, tree)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.begun:
            return func(*self.real(args, func), **self.real(kwargs, func))
        constructs = func in _device_constructors()
        if not constructs and next(tensors((args, kwargs)), None) is None:
            return func(*args, **kwargs)

        source = self._source_of(func, args, kwargs)
        if source and getattr(func, "__name__", "") in VALUES:
            return source.value()
        try:
            with torch.no_grad():
                args, kwargs = map_tensors(
                    lambda t: t if t.is_meta else t.to("meta"), (args, kwargs)
                )
                empty = func(*args, **(kwargs | {"device": "meta"} if constructs else kwargs))
        except (RuntimeError, NotImplementedError):
            if source is None:
                raise
            # The output shape depends on the values, as in nonzero().
            empty = map_tensors(lambda t: t.to("meta"), source.value())
        if source:
            self._remember(source, args[0] if _changes_in_place(func) else empty)
        return empty

    def _source_of(self, func: Any, args: Any, kwargs: Any) -> _Source | None:
        """Return this call's source, or None if it needs a parameter or another stage's result."""
        unknown = False

        def source_of(value: torch.Tensor) -> Any:
            nonlocal unknown
            if id(value) in self._sources:
                return self._sources[id(value)][1]
            unknown = unknown or value.is_meta or isinstance(value, nn.Parameter)
            return _Source(lambda: value)

        args, kwargs = map_tensors(source_of, (args, kwargs))
        return None if unknown else _Source(lambda: _call(func, args, kwargs, self.device))

    def _remember(self, source: _Source, empty: Any) -> None:
        """Remember the source of each tensor that a call returned."""

        def item(number: int) -> _Source:
            return _Source(lambda: list(tensors(source.value()))[number])

        for number, tensor in enumerate(tensors(empty)):
            self._sources[id(tensor)] = (tensor, source if tensor is empty else item(number))


class ShapeCache:
    """Caches the output shapes of submodules that run before a stage.

    Output shapes depend only on input shapes, and each set of input shapes has its own entries. If
    lengths follow the pattern A, B, A, the third batch must not get B's. `is_before()` says whether
    a submodule is being called before the stage begins.
    """

    def __init__(self, model: nn.Module, is_before: Callable[[], bool]) -> None:
        self.is_before = is_before
        self.shapes: Any = None  # of the current inputs
        self.outputs: dict[Any, dict[tuple[Any, ...], Any]] = {}  # by shapes
        self.calls: Counter[int] = Counter()  # in this forward, by module
        for name, module in model.named_modules():
            # Without parameters, the output may have a source among the inputs.
            if name and next(module.parameters(), None) is not None:
                module.forward = self._cached(module, module.forward)

    def _cached(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_before():
                return forward(*args, **kwargs)
            self.calls[id(module)] += 1
            # Include the argument shapes: a forward that takes another branch may pass others.
            key = id(module), self.calls[id(module)], shapes_of((args, kwargs))
            outputs = self.outputs.setdefault(self.shapes, {})
            if key not in outputs:
                output = forward(*args, **kwargs)
                if not self.is_before():  # the stage begins inside this submodule
                    return output
                outputs[key] = output
            return outputs[key]

        return call


def shapes_of(tree: Any) -> tuple[Any, ...]:
    """Return what a model's output shapes depend on: the shapes and dtypes of the tensors in the
    tree, and its numbers and strings."""
    leaves: list[Any] = []

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            leaves.append((tuple(item.shape), item.dtype))
        elif isinstance(item, int | float | bool | str | None):
            leaves.append(item)

    map_tree(add, tree, lambda item: not isinstance(item, list | tuple | Mapping))
    return tuple(leaves)
