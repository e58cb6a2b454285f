"""One random stream per virtual device.

torch has one generator per process and device. The `dp`, `pipeline`, and `hybrid` threads would
draw from it in an unpredictable order, so repeating a command would give different results.
Instead, each virtual device has its own generator state. We swap it in for each operator that draws
random numbers (torch tags these operators), so the thread order no longer matters.

Activation checkpointing saves and restores the generator state around a block. In a thread that
uses a stream, we make it save and restore that stream's state instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from paralab.workload.hooks import Intercepting, draws

_swapping = threading.Lock()


class RandomStreams:
    """One state of the CPU or GPU generator for each virtual device on a rank."""

    def __init__(self, devices: int, seed: int, gpu: int | None = None) -> None:
        self.devices = devices
        gpus = torch.cuda.default_generators
        self.generator = torch.default_generator if gpu is None else gpus[gpu]
        self.seed(seed)

    def seed(self, seed: int) -> None:
        before = self.generator.get_state()
        self.states = []
        for number in range(self.devices):
            self.generator.manual_seed((seed * 1_000_003 + number) % 2**63)
            self.states.append(self.generator.get_state())
        self.generator.set_state(before)

    @contextmanager
    def drawing(self, current: Callable[[], int]) -> Iterator[None]:
        """In this context and thread, draw from the stream of device `current()`."""
        # torch.utils.checkpoint saves and restores the generator's state through these functions.
        torch.get_rng_state = torch.random.get_rng_state = _get
        torch.set_rng_state = torch.random.set_rng_state = _set
        before, _thread.streams, _thread.current = (_thread.streams, _thread.current), self, current
        try:
            with Intercepting(partial(self._swap_in, current)):
                yield
        finally:
            _thread.streams, _thread.current = before

    def _swap_in(
        self, current: Callable[[], int], func: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator with the stream's state in the generator."""
        if not draws(func) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        number = current()
        with _swapping:
            before = self.generator.get_state()
            self.generator.set_state(self.states[number])
            try:
                return func(*args, **kwargs)
            finally:
                self.states[number] = self.generator.get_state()
                self.generator.set_state(before)


class _Thread(threading.local):
    """This thread's streams, and a function that returns the number of its current stream."""

    streams: RandomStreams | None = None
    current: Callable[[], int] = int


_thread = _Thread()
_get_global, _set_global = torch.get_rng_state, torch.set_rng_state


def _get() -> torch.Tensor:
    if _thread.streams and _thread.streams.generator is torch.default_generator:
        return _thread.streams.states[_thread.current()]
    return _get_global()


def _set(new_state: torch.Tensor) -> None:
    if _thread.streams and _thread.streams.generator is torch.default_generator:
        _thread.streams.states[_thread.current()] = new_state
    else:
        _set_global(new_state)
