"""Marks on the time line, in seconds since the run's origin, on one clock for all ranks of a machine.

On a CPU a mark is the time itself. On a GPU it is a CUDA event, resolved later, so that measuring never makes the host wait for the
device: exactly what plain PyTorch would not do.
"""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


class Clock:
    """The host's monotonic clock, which the processes of one machine share."""

    def __init__(self, origin_seconds: float) -> None:
        self.origin_seconds = origin_seconds

    def now(self) -> float:
        return time.perf_counter() - self.origin_seconds

    def mark(self, device: str | None = None) -> Mark:
        return self.now()

    def is_past(self, mark: Mark) -> bool:
        return True

    def resolve(self, mark: Mark) -> float:
        assert isinstance(mark, float)
        return mark


class CudaClock(Clock):
    """Marks are CUDA events on the current stream of a device; each device has a base event tied to the host clock."""

    def __init__(self, origin_seconds: float, devices: list[str]) -> None:
        super().__init__(origin_seconds)
        self.default = devices[0]
        self._bases: dict[int, tuple[torch.cuda.Event, float]] = {}
        for name in dict.fromkeys(devices):
            index = torch.device(name).index
            torch.cuda.synchronize(index)
            base = torch.cuda.Event(enable_timing=True)
            base.record(torch.cuda.current_stream(index))
            torch.cuda.synchronize(index)
            self._bases[index] = (base, self.now())

    def mark(self, device: str | None = None) -> Mark:
        index = torch.device(device or self.default).index
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(index))
        return event

    def is_past(self, mark: Mark) -> bool:
        return isinstance(mark, float) or bool(mark.query())

    def resolve(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        mark.synchronize()  # past already, except at the end of the run
        index = mark.device.index
        base, seconds = self._bases[index]
        resolved = float(seconds + base.elapsed_time(mark) / 1e3)
        # CUDA gives a 32-bit number of milliseconds: from one mark to the next it stays exact, from the start of a long run not.
        self._bases[index] = (mark, resolved)
        return resolved
