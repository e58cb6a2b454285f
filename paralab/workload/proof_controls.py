"""Hold a forward fixed for a proof: remove what may legitimately differ, so that nothing else can.

dropout      switched off
batch_norm   normalizes with its running statistics, as in eval mode, and does not update them
random       draws per sample, from a seed made of the sample itself, so that splitting a batch changes nothing
state        makes buffers read-only, and restores attributes that the forward changes after every call
"""

from __future__ import annotations

import random
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import TorchDispatchMode

from paralab.workload.batch import call_model, map_tensors, take, tensors
from paralab.workload.randomness import without_dropout
from paralab.workload.state import State, put_back, state_of

KINDS = ("batch_norm", "random", "state")
_one_at_a_time = (
    threading.RLock()
)  # for a forward: the model's state, and Python's and numpy's generators, belong to the process
_generator = threading.Lock()  # for a draw: so does torch's
_thread = (
    threading.local()
)  # .seeds: of the samples that this thread computes for; .path: the modules that are being called


@contextmanager
def controlled(model: nn.Module, kinds: Iterable[str], example: Any = None) -> Iterator[None]:
    """Hold the model's forward fixed in this block. Do it before a strategy copies the model:
    copies are held as well.

    `example` are inputs of three samples. They show along which axis of a random tensor the samples
    lie."""
    with ExitStack() as stack:
        stack.enter_context(without_dropout(model))
        if "batch_norm" in kinds:
            stack.enter_context(_frozen_batch_norm(model))
        if "random" in kinds or "state" in kinds:
            _hold(model, state_of(model) if "state" in kinds else {}, "random" in kinds, example)
        yield


def seeded_loss(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A loss that draws random numbers draws them per sample, too: from a seed made of the sample's
    target."""

    def drawn(output: Any, target: Any) -> Any:
        _thread.path, _thread.calls = ["the loss"], Counter()
        # No lock: this micro-batch still holds the last stage, and the one that holds the lock may
        # be waiting for that stage.
        with _PerSample(seeds_of(target)):
            _seed_python()
            return loss(output, target)

    return drawn


@contextmanager
def samples_of(inputs: Any) -> Iterator[None]:
    """The forward in this block is called with stand-ins for these inputs."""
    before, _thread.inputs = getattr(_thread, "inputs", None), inputs
    try:
        yield
    finally:
        _thread.inputs = before


@contextmanager
def _frozen_batch_norm(model: nn.Module) -> Iterator[None]:
    norms = [
        module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    original = nn.functional.batch_norm

    def frozen(
        input: torch.Tensor,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        mean = input.new_zeros(input.shape[1]) if running_mean is None else running_mean
        var = input.new_ones(input.shape[1]) if running_var is None else running_var
        return original(input, mean, var, weight, bias, False, momentum, eps)

    for module in norms:
        module.eval()
    nn.functional.batch_norm = frozen
    try:
        yield
    finally:
        nn.functional.batch_norm = original
        for module in norms:
            module.train()


def _hold(model: nn.Module, state: State, seeded: bool, example: Any) -> None:
    """Wrap the forward in the class, not in the instance: a copy of the model must call its own."""
    for name, module in model.named_modules():
        if seeded and name:
            module.register_forward_pre_hook(_entering(name))
            module.register_forward_hook(_leaving, always_call=True)
    axes = _find_axes(model, example) if seeded and example is not None else {}
    kind: Any = type(model)
    model.__class__ = type(
        kind.__name__,
        (kind,),
        {"forward": _held(kind, state, seeded, axes), "__module__": kind.__module__},
    )


def _held(kind: Any, state: State, seeded: bool, axes: Axes) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not state:
            return drawn(self, *args, **kwargs)
        with _one_at_a_time:  # micro-batches in threads share the model
            had = {name: set(vars(module)) for name, module in self.named_modules()}
            with DisableTorchFunction():  # a mode may turn what is computed here into shapes
                storages = {
                    buffer.untyped_storage().data_ptr()
                    for buffer in self.buffers()
                    if not buffer.is_meta
                }
            try:
                with _ReadOnly(storages):
                    return drawn(self, *args, **kwargs)
            finally:
                with DisableTorchFunction():
                    put_back(
                        self,
                        {
                            place: value
                            for place, value in state.items()
                            if not _is_elsewhere(self, place)
                        },
                    )
                for name, module in self.named_modules():  # an attribute that this call has made
                    for key in [key for key in vars(module) if key not in had[name]]:
                        delattr(module, key)

    def drawn(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not seeded:
            return kind.forward(self, *args, **kwargs)
        inputs = getattr(_thread, "inputs", None)
        seeds = seeds_of((args, kwargs) if inputs is None else inputs)
        _thread.path, _thread.calls = [""], Counter()
        with _one_at_a_time, _PerSample(seeds, axes):
            _seed_python()
            return kind.forward(self, *args, **kwargs)

    return forward


def _seed_python() -> None:
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


def _is_elsewhere(model: nn.Module, place: tuple[str, str]) -> bool:
    """A buffer of another process's stage."""
    buffer = model.get_submodule(place[0])._buffers.get(place[1])
    return buffer is not None and buffer.is_meta


def _entering(name: str) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        getattr(_thread, "path", []).append(name)

    return hook


def _leaving(*_: Any) -> None:
    if path := getattr(_thread, "path", None):
        path.pop()


def seeds_of(inputs: Any) -> list[int]:
    """A number per sample, made of its own values."""
    found: list[int] = []
    with DisableTorchFunction():
        for tensor in tensors(inputs):
            if tensor.ndim and not tensor.is_meta:
                rows = tensor.detach().cpu().reshape(len(tensor), -1).contiguous()
                found = found or [0] * len(rows)
                if len(found) == len(rows):
                    found = [
                        zlib.crc32(bytes(row.view(torch.uint8).tolist()), seed)
                        for row, seed in zip(rows, found, strict=True)
                    ]
    return found


class _ReadOnly(TorchDispatchMode):
    """Ignore writes into these tensors: a statistic that is updated and used in one forward mixes
    the samples of a batch."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if func._schema.is_mutable and args else None
        if (
            isinstance(target, torch.Tensor)
            and not target.is_meta
            and target.untyped_storage().data_ptr() in self.storages
        ):
            return target
        return func(*args, **(kwargs or {}))


class _PerSample(TorchDispatchMode):
    """Operators that draw (torch tags them) do it sample by sample, each from a seed of its own."""

    def __init__(self, seeds: list[int], axes: Axes | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seeds, self.axes = seeds, axes or {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        draw = _next_draw()
        if (
            any(tensor.is_meta for tensor in tensors((args, kwargs)))
            or str(kwargs.get("device")) == "meta"
        ):
            return func(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        shape = _shape_of(args, kwargs)
        axis, each = self.axes[draw] if draw in self.axes else _guess_axis(shape, len(self.seeds))
        if axis is not None and (axis >= len(shape) or shape[axis] != each * len(self.seeds)):
            axis, each = _guess_axis(
                shape, len(self.seeds)
            )  # a branch that the example did not take
        return _drawn(func, args, kwargs, zlib.crc32(repr(draw).encode()), self.seeds, axis, each)


Draw = tuple[str, int]  # the module that draws, and its how-many-th draw in this forward
Axes = dict[
    Draw, tuple[int | None, int]
]  # the axis of the samples, and how many entries each has; None: drawn for all of them


def _next_draw() -> Draw:
    """A module that another process computes is not called here, so draws are counted module by
    module."""
    path: list[str] = getattr(_thread, "path", None) or [""]
    _thread.calls[path[-1]] += 1
    return path[-1], _thread.calls[path[-1]]


def _shape_of(args: Any, kwargs: Any) -> list[int]:
    first = next(tensors((args, kwargs)), None)
    sizes = (list(item) for item in (*args, *kwargs.values()) if isinstance(item, list | tuple))
    return list(first.shape) if first is not None else next(sizes, [])


class _Recorder(TorchDispatchMode):
    """The shape of every draw."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: dict[Draw, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.shapes[_next_draw()] = _shape_of(args, kwargs or {})
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _find_axes(model: nn.Module, example: Any) -> Axes:
    """Call the model with three samples and with two: the axis that shrinks is that of the
    samples."""
    before, shapes = state_of(model), []
    with torch.random.fork_rng(devices=[]):
        for samples in (3, 2):
            _thread.path, _thread.calls = [""], Counter()
            with _Recorder() as recorder:
                call_model(model, take(example, 0, samples))
            shapes.append(recorder.shapes)
            put_back(model, before)
    found: Axes = {}
    for draw in shapes[0].keys() & shapes[1].keys():
        three, two = shapes[0][draw], shapes[1][draw]
        moved = [
            axis for axis, (a, b) in enumerate(zip(three, two, strict=False)) if a * 2 == b * 3
        ]
        found[draw] = (moved[0], three[moved[0]] // 3) if moved else (None, 0)
    return found


def _drawn(
    func: Any, args: Any, kwargs: Any, draw: int, seeds: list[int], axis: int | None, each: int
) -> Any:
    first, shape = next(tensors((args, kwargs)), None), _shape_of(args, kwargs)
    device = first.device if first is not None else kwargs.get("device")
    name = func._schema.name
    if name == "aten::randperm" and seeds and args[0] % len(seeds) == 0:
        return (
            func(*args, **kwargs).sort().values
        )  # it would mix the samples of a batch: they stay in order
    args_there, kwargs_there = map_tensors(
        lambda t: t.cpu(), (args, kwargs)
    )  # drawn on the CPU, whatever the device is
    if "device" in kwargs:
        kwargs_there["device"] = "cpu"

    def of_sample(number: int) -> Any:
        def cut(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return (
                    item.narrow(axis or 0, number * each, each)
                    if list(item.shape) == shape
                    else item
                )
            if isinstance(item, list | tuple):
                return (
                    [*item[:axis], each, *item[axis + 1 :]]
                    if axis is not None and list(item) == shape
                    else item
                )
            return item

        return func(*map(cut, args_there), **{key: cut(item) for key, item in kwargs_there.items()})

    with _generator, torch.random.fork_rng(devices=[]):
        drawn = []
        for number, seed in enumerate(seeds) if axis is not None else [(0, 0)]:
            torch.default_generator.manual_seed(seed ^ (draw << 1))
            drawn.append(
                of_sample(number) if axis is not None else func(*args_there, **kwargs_there)
            )
    if name.endswith("_"):
        return args[0].copy_(args_there[0])
    if axis is None:
        return map_tensors(lambda t: t.to(device), drawn[0])
    if isinstance(drawn[0], torch.Tensor):
        return torch.cat(drawn, axis).to(device)
    return tuple(torch.cat(column, axis).to(device) for column in zip(*drawn, strict=True))


def _guess_axis(shape: list[int], samples: int) -> tuple[int | None, int]:
    """(the axis along which the samples lie, how many entries each has there); (None, 0): drawn for
    all samples."""
    if samples and samples in shape:
        return shape.index(samples), 1
    if samples and shape and shape[0] and shape[0] % samples == 0:
        return 0, shape[0] // samples
    return None, 0
