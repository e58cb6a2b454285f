"""Remove legitimate differences from a model's forward pass for verification, so that any remaining
difference comes from the strategy.

dropout      turned off
batch_norm   normalizes with its running statistics, as in eval mode, and does not update them
random       draws per sample (`paralab.workload.sample_draws`)
state        makes buffers read-only, and restores attributes that a forward pass changes
casts        ignores casts to fp32 in fp64, as in the norms of Hugging Face models, because such a
             cast turns a rounding difference of 1e-16 into one of 1e-8
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction

from paralab.workload.hooks import Intercepting, patched
from paralab.workload.randomness import without_dropout
from paralab.workload.sample_draws import (
    Axes,
    draw_per_sample,
    find_axes,
    original_inputs,
    track_modules,
)
from paralab.workload.state import State, restored, state_of

# Run one forward pass at a time, because all threads share the model's state and the generators of
# Python and numpy.
_forward_lock = threading.RLock()


@contextmanager
def controlled(model: nn.Module, kinds: Iterable[str], example: Any = None) -> Iterator[None]:
    """Remove these differences in this context. Enter it before a strategy copies the model,
    so that the controls also apply to the copies.

    `example` has the inputs of three samples, which reveal the sample dim of random tensors."""
    with ExitStack() as stack:
        stack.enter_context(without_dropout(model))
        if "casts" in kinds:
            stack.enter_context(without_casts())
        if "batch_norm" in kinds:
            stack.enter_context(_frozen_batch_norm(model))
        if "random" in kinds or "state" in kinds:
            _hold(model, state_of(model) if "state" in kinds else {}, "random" in kinds, example)
        yield


@contextmanager
def without_casts() -> Iterator[list[torch.dtype]]:
    """Ignore casts of fp64 tensors to fp32 in all threads of this process, and record them."""
    ignored: list[torch.dtype] = []
    to, to_float, softmax = torch.Tensor.to, torch.Tensor.float, nn.functional.softmax

    def keep(dtype: Any) -> Any:
        if dtype is not torch.float32:
            return dtype
        ignored.append(dtype)
        return torch.float64

    def keep_to(self: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        if self.dtype is torch.float64:
            args, named = tuple(map(keep, args)), {k: keep(v) for k, v in named.items()}
        return to(self, *args, **named)

    def keep_float(self: torch.Tensor, **named: Any) -> torch.Tensor:
        if self.dtype is not torch.float64:
            return to_float(self, **named)
        ignored.append(self.dtype)
        return self

    def keep_softmax(input: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        if input.dtype is torch.float64:
            args, named = tuple(map(keep, args)), {k: keep(v) for k, v in named.items()}
        return softmax(input, *args, **named)

    with (
        patched(torch.Tensor, to=keep_to, float=keep_float),
        patched(nn.functional, softmax=keep_softmax),
    ):
        yield ignored


def casts_in_vain(forward: Callable[[], object]) -> bool:
    """Return whether a forward pass in fp64 casts to fp32 but also works without these casts."""
    with suppress(Exception), without_casts() as ignored:
        forward()
        return bool(ignored)
    return False


@contextmanager
def _frozen_batch_norm(model: nn.Module) -> Iterator[None]:
    original = nn.functional.batch_norm

    def frozen(
        input: torch.Tensor,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        *more: Any,
        **named: Any,
    ) -> torch.Tensor:
        mean = input.new_zeros(input.shape[1]) if running_mean is None else running_mean
        var = input.new_ones(input.shape[1]) if running_var is None else running_var
        return original(input, mean, var, weight, bias, False, *more, **named)

    with ExitStack() as stack:
        stack.enter_context(patched(nn.functional, batch_norm=frozen))
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                stack.enter_context(patched(module, training=False))
        yield


def _hold(model: nn.Module, state: State, per_sample: bool, example: Any) -> None:
    """Replace `forward` on the class, because copies of the model must call their own method."""
    axes: Axes | None = None
    if per_sample:
        track_modules(model)
        axes = find_axes(model, example) if example is not None else {}
    kind: Any = type(model)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _forward_lock, _read_only(self, state) if state else nullcontext():
            if axes is None:
                return kind.forward(self, *args, **kwargs)
            with draw_per_sample(original_inputs((args, kwargs)), axes):
                return kind.forward(self, *args, **kwargs)

    attributes = {"forward": forward, "__module__": kind.__module__}
    model.__class__ = type(kind.__name__, (kind,), attributes)


@contextmanager
def _read_only(model: nn.Module, state: State) -> Iterator[None]:
    """Ignore writes to buffers in this context, and restore attributes afterward. A forward pass
    that updates a statistic and then uses it would mix the samples of a batch."""
    with DisableTorchFunction():  # a function mode may run these operations on meta tensors
        storages = {b.untyped_storage().data_ptr() for b in model.buffers() if not b.is_meta}

    def ignore_writes(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        target = args[0] if func._schema.is_mutable and args else None
        is_buffer = (
            isinstance(target, torch.Tensor)
            and not target.is_meta
            and target.untyped_storage().data_ptr() in storages
        )
        return target if is_buffer else func(*args, **kwargs)

    with restored(model, state), Intercepting(ignore_writes):
        yield
