"""Time marks, in seconds since the run's origin, on one clock for all ranks on a machine.

On a CPU, a mark is the time itself. On a GPU, it is a CUDA event that is resolved later. Measuring
must not make the CPU wait for the device where plain PyTorch would not.
"""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


class Clock:
    """The machine's monotonic clock, which its processes share."""

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

    def release(self, marks: list[Mark]) -> None:
        """Recycle resolved marks that are no longer needed."""


class CudaClock(Clock):
    """A clock whose marks are CUDA events on a device's current stream. Each device has a base
    event whose time on the CPU clock is known.

    A mark delays the next kernel launch, so it must be cheap. Reuse events, and look up a device's
    index and stream once: asking torch for the current stream takes longer than recording on it.
    """

    def __init__(self, origin_seconds: float, devices: list[str]) -> None:
        super().__init__(origin_seconds)
        self._index: dict[str | None, int] = {name: torch.device(name).index for name in devices}
        self._index[None] = self._index[devices[0]]
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}
        self._bases: dict[int, tuple[torch.cuda.Event, float]] = {}
        self._free: dict[int, list[torch.cuda.Event]] = {
            index: [] for index in self._index.values()
        }
        for index in self._free:
            torch.cuda.synchronize(index)
            base = torch.cuda.Event(enable_timing=True)
            base.record(torch.cuda.current_stream(index))
            torch.cuda.synchronize(index)
            self._bases[index] = (base, self.now())

    def mark(self, device: str | None = None) -> Mark:
        index = self._index[device]
        try:
            event = self._free[index].pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream(index))
        return event

    def is_past(self, mark: Mark) -> bool:
        return isinstance(mark, float) or bool(mark.query())

    def resolve(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        mark.synchronize()  # already complete, except at the end of the run
        index = mark.device.index
        base, seconds = self._bases[index]
        resolved = float(seconds + base.elapsed_time(mark) / 1e3)
        # CUDA returns milliseconds as a 32-bit float. That is accurate from one mark to the next,
        # but not from the start of a long run.
        self._bases[index] = (mark, resolved)
        return resolved

    def release(self, marks: list[Mark]) -> None:
        for mark in marks:
            if not isinstance(mark, float) and mark is not self._bases[mark.device.index][0]:
                self._free[mark.device.index].append(mark)

    def _stream(self, index: int) -> torch.cuda.Stream:
        key = index, torch._C._cuda_getCurrentRawStream(index)
        if key not in self._streams:
            self._streams[key] = torch.cuda.current_stream(index)
        return self._streams[key]
