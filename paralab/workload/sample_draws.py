"""Draw random numbers separately for each sample. A sample's own values determine its seed, so
splitting a batch does not change the numbers.

torch tags the operators that draw random numbers. A dispatch mode intercepts them and draws sample
by sample. It must know a random tensor's sample dim, so we call the model with three samples and
then with two to see which dim changes.
"""

from __future__ import annotations

import random
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunction

from paralab.workload.batch import call_model, copied, map_tensors, take, tensors
from paralab.workload.hooks import Intercepting, draws
from paralab.workload.state import put_back, state_of

_generator = threading.Lock()  # all threads share torch's generator

Draw = tuple[str, int]  # the module that draws, and the number of its draw in this forward pass


class _Thread(threading.local):
    """The forward pass that this thread runs.

    inputs  the original inputs, if the model is called with substitutes
    path    the modules that are being called, innermost last
    calls   the number of draws per module
    mode    creates the dispatch mode that draws per sample, if active
    """

    def __init__(self) -> None:
        self.inputs: Any = None
        self.mode: Callable[[], Intercepting] | None = None
        self.begin("")

    def begin(self, path: str) -> None:
        self.path, self.calls = [path], Counter[str]()


_thread = _Thread()


class Axis(NamedTuple):
    """A random tensor's sample dim, and the number of entries per sample. If `number` is None, all
    samples share one draw."""

    number: int | None
    entries: int


Axes = dict[Draw, Axis]


@contextmanager
def samples_of(inputs: Any) -> Iterator[None]:
    """Declare that model calls in this context get substitutes for these inputs."""
    before, _thread.inputs = _thread.inputs, inputs
    try:
        yield
    finally:
        _thread.inputs = before


def seeded_loss(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a loss that also draws per sample, with a seed derived from the sample's target."""

    def seeded(output: Any, target: Any) -> Any:
        # Do not lock here. This micro-batch is still in the last stage, and another micro-batch
        # with the lock may be waiting for that stage.
        with draw_per_sample(target, {}, "the loss"):
            return loss(output, target)

    return seeded


def original_inputs(inputs: Any) -> Any:
    """Return the original inputs if `inputs` are substitutes, otherwise `inputs`."""
    return inputs if _thread.inputs is None else _thread.inputs


@contextmanager
def draw_per_sample(inputs: Any, axes: Axes, path: str = "") -> Iterator[None]:
    """Draw separately for each sample of `inputs` in this context, which runs module `path`."""
    _thread.begin(path)
    mode = partial(Intercepting, partial(_draw_per_sample, _make_seeds(inputs), axes))
    before, _thread.mode = _thread.mode, mode
    try:
        with mode():
            random.seed(0)
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(0)
            yield
    finally:
        _thread.mode = before


def replay_draws() -> Callable[[], AbstractContextManager[None]]:
    """Save the current point in the forward pass. The returned contexts repeat the draws from that
    point on, as recomputation in the backward pass requires."""
    mode, path, calls = _thread.mode, list(_thread.path), _thread.calls.copy()

    @contextmanager
    def replay() -> Iterator[None]:
        if mode is None:
            yield
            return
        before = _thread.mode, _thread.path, _thread.calls
        _thread.mode, _thread.path, _thread.calls = mode, list(path), calls.copy()
        try:
            with mode():
                yield
        finally:
            _thread.mode, _thread.path, _thread.calls = before

    return replay


def track_modules(model: nn.Module) -> None:
    """Track which module is being called, because draws are counted per module. A shared count
    would differ between processes, because a process does not call other processes' modules."""
    for name, module in model.named_modules():
        if name:
            module.register_forward_pre_hook(partial(_enter, name))
            module.register_forward_hook(_leave, always_call=True)


def _enter(name: str, *_: Any) -> None:
    _thread.path.append(name)


def _leave(*_: Any) -> None:
    if _thread.path:
        _thread.path.pop()


def _next_draw() -> Draw:
    module = _thread.path[-1] if _thread.path else ""
    _thread.calls[module] += 1
    return module, _thread.calls[module]


def _make_seeds(inputs: Any) -> list[int]:
    """Derive a seed for each sample from the sample's own values."""
    seeds: list[int] = []
    with DisableTorchFunction():
        for tensor in tensors(inputs):
            if not tensor.ndim or tensor.is_meta:
                continue
            rows = tensor.detach().cpu().reshape(len(tensor), -1).contiguous()
            seeds = seeds or [0] * len(rows)
            if len(seeds) == len(rows):
                seeds = [
                    zlib.crc32(bytes(row.view(torch.uint8).tolist()), seed)
                    for row, seed in zip(rows, seeds, strict=True)
                ]
    return seeds


def find_axes(model: nn.Module, example: Any) -> Axes:
    """Find each random tensor's sample dim, which shrinks with two samples instead of three."""
    before = state_of(model)
    shapes: list[dict[Draw, list[int]]] = []

    def record(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if draws(func):
            shapes[-1][_next_draw()] = _shape_of(args, kwargs)
        return func(*args, **kwargs)

    with torch.random.fork_rng(devices=[]):
        for samples in (3, 2):
            _thread.begin("")
            shapes.append({})
            with Intercepting(record):
                call_model(model, copied(take(example, 0, samples)))
            put_back(model, before)

    axes: Axes = {}
    with_three, with_two = shapes
    for draw in with_three.keys() & with_two.keys():
        three, two = with_three[draw], with_two[draw]
        shrunk = [n for n, (a, b) in enumerate(zip(three, two, strict=False)) if a * 2 == b * 3]
        axes[draw] = Axis(shrunk[0], three[shrunk[0]] // 3) if shrunk else Axis(None, 0)
    return axes


def _draw_per_sample(
    seeds: list[int], axes: Axes, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run an operator. If it is random, draw separately for each sample, with the sample's seed."""
    if not draws(func):
        return func(*args, **kwargs)
    draw = _next_draw()
    on_meta = str(kwargs.get("device")) == "meta"
    if on_meta or any(tensor.is_meta for tensor in tensors((args, kwargs))):
        return func(*args, **kwargs)

    kwargs.pop("generator", None)
    axis = _choose_axis(axes.get(draw), _shape_of(args, kwargs), len(seeds))
    return _draw(func, args, kwargs, zlib.crc32(repr(draw).encode()), seeds, axis)


def _shape_of(args: Any, kwargs: Any) -> list[int]:
    """Return the random tensor's shape: the first argument's shape, or the given sizes."""
    first = next(tensors((args, kwargs)), None)
    sizes = (list(item) for item in (*args, *kwargs.values()) if isinstance(item, list | tuple))
    return list(first.shape) if first is not None else next(sizes, [])


def _choose_axis(axis: Axis | None, shape: list[int], samples: int) -> Axis:
    """Return the known axis, or guess if the example took a different branch."""
    if axis and (
        axis.number is None or shape[axis.number : axis.number + 1] == [axis.entries * samples]
    ):
        return axis
    if samples and samples in shape:
        return Axis(shape.index(samples), 1)
    if samples and shape and shape[0] and shape[0] % samples == 0:
        return Axis(0, shape[0] // samples)
    return Axis(None, 0)


def _draw(func: Any, args: Any, kwargs: Any, draw: int, seeds: list[int], axis: Axis) -> Any:
    """Run a random operator once per sample, or once for all samples."""
    if func._schema.name == "aten::randperm" and seeds and args[0] % len(seeds) == 0:
        # A permutation would mix the samples in a batch, so keep their order.
        return func(*args, **kwargs).sort().values

    first, shape = next(tensors((args, kwargs)), None), _shape_of(args, kwargs)
    device = first.device if first is not None else kwargs.get("device")
    # Draw on the CPU, so all devices get the same numbers.
    args_there, kwargs_there = map_tensors(lambda t: t.cpu(), (args, kwargs))
    if "device" in kwargs:
        kwargs_there["device"] = "cpu"

    def cut(item: Any, sample: int) -> Any:
        """Return this sample's part of an argument."""
        if axis.number is None:
            return item
        if isinstance(item, torch.Tensor) and list(item.shape) == shape:
            return item.narrow(axis.number, sample * axis.entries, axis.entries)
        if isinstance(item, list | tuple) and list(item) == shape:
            return [*item[: axis.number], axis.entries, *item[axis.number + 1 :]]
        return item

    results = []
    with _generator, torch.random.fork_rng(devices=[]):
        for sample, seed in enumerate([0] if axis.number is None else seeds):
            torch.default_generator.manual_seed(seed ^ (draw << 1))
            own = {key: cut(item, sample) for key, item in kwargs_there.items()}
            results.append(func(*(cut(item, sample) for item in args_there), **own))

    if func._schema.name.endswith("_"):
        return args[0].copy_(args_there[0])
    if axis.number is None:
        return map_tensors(lambda t: t.to(device), results[0])
    if isinstance(results[0], torch.Tensor):
        return torch.cat(results, axis.number).to(device)
    columns = zip(*results, strict=True)
    return tuple(torch.cat(column, axis.number).to(device) for column in columns)
