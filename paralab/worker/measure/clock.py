"""Time marks, in seconds since the run's origin, on one clock for all ranks.

On a CPU, a mark is the time itself. On a GPU, it is a CUDA event whose time is read later, because
measuring must not add waits for the device.

Monotonic clocks start at the machine's boot, so two machines' clocks can differ by days. A rank on
another machine asks rank 0 for its time several times. Rank 0 read its clock at some point between
the question and the arrival of the answer, so the fastest round trip is the most accurate:

    asked at 10.000, answered "510.020", arrived at 10.004    ->    offset 500.018 ± 0.002
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paralab.machine.host import clock_mark

QUESTIONS = 32

Mark = float | torch.cuda.Event


class Clock:
    """The machine's monotonic clock, which all its processes share. On a GPU, a mark is a CUDA
    event on the device's current stream. Each device has a base event whose time on this clock is
    known.

    Recording a mark delays the next kernel launch, so it must be cheap. This class reuses events
    and caches each device's index and streams, because asking torch for the current stream takes
    longer than recording an event.
    """

    def __init__(self, origin_seconds: float, gpus: Sequence[str] = ()) -> None:
        self.origin_seconds = origin_seconds
        self._index: dict[str | None, int] = {name: torch.device(name).index for name in gpus}
        if gpus:
            self._index[None] = self._index[gpus[0]]
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}
        self._bases: dict[int, tuple[torch.cuda.Event, float]] = {}
        self._free: dict[int, list[torch.cuda.Event]] = {each: [] for each in self._index.values()}
        for index in self._free:
            torch.cuda.synchronize(index)
            base = torch.cuda.Event(enable_timing=True)
            base.record(torch.cuda.current_stream(index))
            torch.cuda.synchronize(index)
            self._bases[index] = (base, self.now())

    def now(self) -> float:
        return time.perf_counter() - self.origin_seconds

    def mark(self, device: str | None = None) -> Mark:
        if not self._index:
            return self.now()
        index = self._index[device]
        try:
            event = self._free[index].pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        key = index, torch._C._cuda_getCurrentRawStream(index)
        if key not in self._streams:
            self._streams[key] = torch.cuda.current_stream(index)
        event.record(self._streams[key])
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
        # CUDA returns milliseconds as a 32-bit float. That is accurate enough for the time between
        # two marks, but not for the time since the start of a long run.
        self._bases[index] = (mark, resolved)
        return resolved

    def release(self, marks: list[Mark]) -> None:
        """Recycle resolved marks that are no longer needed."""
        for mark in marks:
            if not isinstance(mark, float) and mark is not self._bases[mark.device.index][0]:
                self._free[mark.device.index].append(mark)


@dataclass(frozen=True)
class Offset:
    """Rank 0's clock minus this rank's clock."""

    seconds: float
    uncertainty: float


ALIGNED = Offset(0.0, 0.0)


def best_offset(trips: Sequence[tuple[float, float, float]]) -> Offset:
    """Compute the offset from the fastest round trip. Each trip is a tuple (time asked, rank 0's
    time, time answered). The uncertainty is half of the fastest trip."""
    asked, theirs, arrived = min(trips, key=lambda trip: trip[2] - trip[0])
    return Offset(theirs - (asked + arrived) / 2, (arrived - asked) / 2)


def offset_to_rank_0() -> Offset:
    """Measure this rank's offset. All ranks must call this. Ranks on rank 0's machine get zero."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mark = int.from_bytes(hashlib.sha256(clock_mark().encode()).digest()[:7])
    marks = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(marks, torch.tensor([mark]))
    offset = ALIGNED
    for other in (number for number in range(ranks) if marks[number] != marks[0]):
        if rank == 0:
            _answer(other)
        elif rank == other:
            offset = best_offset([_ask() for _ in range(QUESTIONS)])
    return offset


def _ask() -> tuple[float, float, float]:
    theirs = torch.zeros(1, dtype=torch.float64)
    asked = time.perf_counter()
    dist.send(theirs, 0)
    dist.recv(theirs, 0)
    return asked, float(theirs), time.perf_counter()


def _answer(other: int) -> None:
    for _ in range(QUESTIONS):
        dist.recv(torch.zeros(1, dtype=torch.float64), other)
        dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), other)
