"""The status board between the launcher and its ranks. It is a small file mapped into all their
processes, so posting does not need a system call.

Each rank posts its phase, its step, and when they began. So the launcher detects a hang even if the
rank is stopped or never releases the GIL. In the other direction, the launcher posts the step
before which all ranks must stop.

To stop together, all ranks must agree on a step. One rank can be a step ahead of another, and the
launcher sees posts late. So a rank that reaches the posted step waits there. If all ranks wait at
the same step, they have agreed. Otherwise, the launcher posts a later step (see `agree`).
"""

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PHASES = ("start", "step", "save", "end", "idle")  # idle: waiting for other ranks to finish
NEVER = -1
# Exit codes that we assign. UNKNOWN_CODE: the process that forked the rank was killed, so the real code
# is unknown. LEFT_EARLY: the rank exited with 0, but its last post is not "end".
UNKNOWN_CODE = 121
LEFT_EARLY = 120
HEADER = struct.Struct("<qq")  # the step to stop before, and whether all ranks agreed
SLOT = struct.Struct("<qqdq")  # phase, step, start time, waiting
WAIT_SECONDS = 0.005


@dataclass(frozen=True)
class Post:
    phase: str
    step: int
    since: float  # time.perf_counter(), which all processes on a machine share
    waiting: bool


class StatusBoard:
    def __init__(self, path: Path, ranks: int) -> None:
        self.ranks = ranks
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), HEADER.size + ranks * SLOT.size)

    @classmethod
    def create(cls, path: Path, ranks: int) -> Self:
        slots = SLOT.pack(PHASES.index("start"), NEVER, time.perf_counter(), False) * ranks
        path.write_bytes(HEADER.pack(NEVER, False) + slots)
        return cls(path, ranks)

    def post(self, rank: int, phase: str, step: int, waiting: bool = False) -> None:
        # Do not use `pack_into`. It first fills the slot with zeros, which the launcher could read.
        at = self._at(rank)
        self._map[at : at + SLOT.size] = SLOT.pack(
            PHASES.index(phase), step, time.perf_counter(), waiting
        )

    def read(self, rank: int) -> Post:
        phase, step, since, waiting = SLOT.unpack_from(self._map, self._at(rank))
        return Post(PHASES[phase], step, since, bool(waiting))

    @property
    def posts(self) -> list[Post]:
        return [self.read(rank) for rank in range(self.ranks)]

    def agree(self) -> None:
        """Do the launcher's part in stopping all ranks at the same step. Call this at each poll
        until all ranks have exited."""
        stop_at, agreed = HEADER.unpack_from(self._map)
        if not agreed:
            self.stop(*next_stop(stop_at, [(post.step, post.waiting) for post in self.posts]))

    def stop(self, before: int, agreed: bool) -> None:
        HEADER.pack_into(self._map, 0, before, agreed)

    def stops_before(self, rank: int, step: int) -> bool:
        """Do a rank's part in stopping all ranks at the same step. Return whether to stop before
        this step. This may wait until all ranks have reached the same step."""
        stop_at, agreed = HEADER.unpack_from(self._map)
        if stop_at == NEVER or step < stop_at:
            return False
        self.post(rank, "step", step, waiting=True)
        while not agreed and step >= stop_at:
            time.sleep(WAIT_SECONDS)
            stop_at, agreed = HEADER.unpack_from(self._map)
        return bool(agreed)

    def _at(self, rank: int) -> int:
        return HEADER.size + rank * SLOT.size


def next_stop(stop_at: int, ranks: list[tuple[int, bool]]) -> tuple[int, bool]:
    """Return the step to stop before, and whether all ranks agree on it. `ranks` contains each
    rank's step, and whether the rank is waiting.

    first request              7 running   8 running       -> stop before 9
    one waits, one is behind   9 waiting   8 running       -> still 9
    one was too fast           9 waiting   9 running       -> stop before 10
    one passed it too early    9 waiting  10 waiting       -> stop before 11
    all have arrived          10 waiting  10 waiting       -> agreed
    """
    if all(waiting and step == stop_at for step, waiting in ranks):
        return stop_at, True
    passed = any(step > stop_at or (step == stop_at and not waiting) for step, waiting in ranks)
    if stop_at == NEVER or passed:
        stop_at = max(step for step, _ in ranks) + 1
    return stop_at, False
