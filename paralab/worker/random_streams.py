"""One random stream per virtual device.

torch has one generator per process and device. The `dp`, `pipeline`, and `hybrid` threads would
draw from it in whatever order they run, so the same command would never train the same model twice.
Instead, each virtual device has its own generator state. We swap it in for each operator that draws
random numbers (torch tags these operators), so the thread order no longer matters.

Activation checkpointing saves and restores the generator state around a block. In a thread that
uses a stream, it saves and restores that stream's state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_swapping = threading.Lock()
_active = threading.local()  # .swap: this thread's dispatch mode


class RandomStreams:
    """One state of the CPU or GPU generator for each virtual device on a rank."""

    def __init__(self, devices: int, seed: int, gpu: int | None = None) -> None:
        self.devices = devices
        self.generator = (
            torch.default_generator if gpu is None else torch.cuda.default_generators[gpu]
        )
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
        """In this block and thread, draw from the stream of device `current()`."""
        _follow_streams()
        before = getattr(_active, "swap", None)
        try:
            with _Swap(self, current) as _active.swap:
                yield
        finally:
            _active.swap = before


class _Swap(TorchDispatchMode):
    def __init__(self, streams: RandomStreams, current: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.streams, self.current = streams, current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if not draws or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        states, number, generator = self.streams.states, self.current(), self.streams.generator
        with _swapping:
            before = generator.get_state()
            generator.set_state(states[number])
            try:
                return func(*args, **kwargs)
            finally:
                states[number] = generator.get_state()
                generator.set_state(before)


_get_global, _set_global = torch.get_rng_state, torch.set_rng_state


def _swap() -> _Swap | None:
    """Return this thread's dispatch mode, or None if it does not replace the CPU generator."""
    swap: _Swap | None = getattr(_active, "swap", None)
    return swap if swap and swap.streams.generator is torch.default_generator else None


def _get() -> torch.Tensor:
    swap = _swap()
    return swap.streams.states[swap.current()] if swap else _get_global()


def _set(new_state: torch.Tensor) -> None:
    if swap := _swap():
        swap.streams.states[swap.current()] = new_state
    else:
        _set_global(new_state)


def _follow_streams() -> None:
    """Make torch.get_rng_state, which torch.utils.checkpoint calls, follow the streams."""
    torch.get_rng_state = torch.random.get_rng_state = _get
    torch.set_rng_state = torch.random.set_rng_state = _set
