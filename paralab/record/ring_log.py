"""The last operations of a rank, those that are open among them, in a file of fixed size mapped
into the process.

A row is a few numbers: which call it is (what the numbers of calls stand for is written down once,
in the journal), when it began, and its number in the group. Writing it is one store into memory, so
it can be afforded in every step; what is open stays readable from outside, whatever happens to the
process.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from pathlib import Path
from typing import NamedTuple

ROWS = 512
OPEN, OPEN_ASIDE, FAILED = (
    -1.0,
    -2.0,
    -3.0,
)  # instead of seconds; aside: in another thread; failed: told elsewhere


class Row(NamedTuple):
    number: int  # from 1; 0: an empty row
    call: int
    t: float
    step: int
    first: int
    seconds: float


ROW = struct.Struct("<qqdqqd")
END = struct.Struct("<d")  # the last one, which changes when it is over


class Recent:
    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.write(bytes(ROWS * ROW.size))
            file.flush()
            self._map = mmap.mmap(file.fileno(), ROWS * ROW.size)
        self._numbers = itertools.count(1)  # one step of the interpreter: threads need no lock
        self._begun = 0

    def begin(self, call: int, t: float, step: int, first: int, seconds: float) -> int:
        """A new row; its number."""
        number = self._begun = next(self._numbers)
        ROW.pack_into(self._map, number % ROWS * ROW.size, number, call, t, step, first, seconds)
        return number

    def end(self, number: int, seconds: float) -> None:
        if self._begun - number < ROWS:  # else its place was taken meanwhile
            END.pack_into(self._map, (number % ROWS + 1) * ROW.size - END.size, seconds)


def read_recent(path: Path) -> list[Row]:
    """In the order in which they began."""
    try:
        rows = map(Row._make, ROW.iter_unpack(path.read_bytes()))
        return sorted(row for row in rows if row.number)
    except (OSError, struct.error):
        return []
