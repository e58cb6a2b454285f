"""Run the part of the model before a stage on the meta device, and compute real values on demand.

The user's entire forward() runs, including the part before the stage. That part needs no memory or
arithmetic, because all its operators run on meta tensors. Some values, such as a padding mask or a
condition like `x.any()`, depend only on the inputs, not on parameters. Each process has the
inputs, so it computes these values when the model uses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._device import _device_constructors

from paralab.workload.batch import map_tensors, map_tree, tensors

# Methods that read the tensor's values and return something other than a tensor.
VALUES = "item tolist numpy equal __bool__ __int__ __float__ __index__ __contains__".split()


class _Source:
    """The real value of a meta tensor, computed when it is needed."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.value = cache(compute)


def _item(source: _Source, number: int) -> torch.Tensor:
    return next(islice(tensors(source.value()), number, None))


def _call(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Repeat a call with sources replaced by their real values."""
    args, kwargs = map_tree(
        lambda source: source.value(), (args, kwargs), lambda item: isinstance(item, _Source)
    )
    if _changes_in_place(func):
        args = (args[0].clone(), *args[1:])
    if func in _device_constructors() or "device" in kwargs:
        # The model may have read the device from its inputs, which are on the meta device here.
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
    """Runs all operators on meta tensors until `begun` is true. After that, replaces each meta
    tensor with the real tensor, or raises `refuse(shape)` if another stage computes it."""

    def __init__(
        self, device: torch.device, refuse: Callable[[tuple[int, ...]], Exception]
    ) -> None:
        super().__init__()
        self.device, self.refuse = device, refuse
        self.begun = False
        self.replaced = False  # whether a meta tensor had to be replaced
        # Meta tensor's id -> (tensor, source). Storing the tensor prevents reuse of its id.
        self._sources: dict[int, tuple[torch.Tensor, _Source]] = {}

    def know(self, empty: torch.Tensor, value: torch.Tensor) -> None:
        self._sources[id(empty)] = (empty, _Source(lambda: value))

    def leave(self) -> None:
        """Leave the mode if it is still innermost."""
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
            if getattr(func, "__name__", "") == "__get__":  # an attribute: a shape or a dtype
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
            results = args[0] if _changes_in_place(func) else empty
            for number, tensor in enumerate(tensors(results)):
                item = source if tensor is results else _Source(partial(_item, source, number))
                self._sources[id(tensor)] = tensor, item
        return empty

    def _source_of(self, func: Any, args: Any, kwargs: Any) -> _Source | None:
        """Return the source of this call's result, or None if it needs other stages."""
        unknown = False

        def source_of(value: torch.Tensor) -> Any:
            nonlocal unknown
            if id(value) in self._sources:
                return self._sources[id(value)][1]
            unknown = unknown or value.is_meta or isinstance(value, nn.Parameter)
            return _Source(lambda: value)

        args, kwargs = map_tensors(source_of, (args, kwargs))
        return None if unknown else _Source(lambda: _call(func, args, kwargs, self.device))


class ShapeCache:
    """Caches the output shapes of submodules that run before a stage.

    Output shapes depend only on input shapes, and each set of input shapes has its own entries, so
    that batches with different lengths do not get each other's shapes. `is_before()` returns
    whether the model is still before the stage.
    """

    def __init__(self, model: nn.Module, is_before: Callable[[], bool]) -> None:
        self.is_before = is_before
        self.shapes: Any = None  # shapes of the current inputs
        self.outputs: dict[Any, dict[tuple[Any, ...], Any]] = {}  # input shapes -> outputs
        self.calls: Counter[int] = Counter()  # module -> its calls in this forward pass
        for name, module in model.named_modules():
            # Do not cache submodules without parameters, because their output may have a source.
            if name and next(module.parameters(), None) is not None:
                module.forward = self._cached(module, module.forward)

    def _cached(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_before():
                return forward(*args, **kwargs)
            self.calls[id(module)] += 1
            # Include the argument shapes, which may change if the model takes a different branch.
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
    """Return everything in the tree that determines a model's output shapes: the shapes and dtypes
    of tensors, and all numbers and strings."""
    leaves: list[Any] = []

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            leaves.append((tuple(item.shape), item.dtype))
        elif isinstance(item, int | float | bool | str | None):
            leaves.append(item)

    map_tree(add, tree, lambda item: not isinstance(item, list | tuple | Mapping))
    return tuple(leaves)
