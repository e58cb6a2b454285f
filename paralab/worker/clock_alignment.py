"""One clock for all ranks: a rank on another machine measures its clock offset from rank 0.

Monotonic clocks count from the machine's boot, so machines differ by days. A rank asks rank 0 for
its time several times. Rank 0 read its clock between the question and the arrival of its answer, so
the fastest round trip is the most accurate:

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


@dataclass(frozen=True)
class Offset:
    """Rank 0's clock minus this one."""

    seconds: float
    uncertainty: float


ALIGNED = Offset(0.0, 0.0)


def best_offset(trips: Sequence[tuple[float, float, float]]) -> Offset:
    """Compute the offset from the fastest round trip (asked, rank 0's time, arrived). The
    uncertainty is half of that trip."""
    asked, theirs, arrived = min(trips, key=lambda trip: trip[2] - trip[0])
    return Offset(theirs - (asked + arrived) / 2, (arrived - asked) / 2)


def offset_to_rank_0() -> Offset:
    """Measure the offset. All ranks call this; ranks that share rank 0's clock get zero."""
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
