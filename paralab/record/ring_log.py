"""A rank's last operations, including unfinished ones, in a fixed-size file mapped into its memory.

A row contains a few numbers: which call it is (the log file explains each number once), when it
began, and its sequence number in the group. Writing a row only writes to memory, which is cheap
enough for every step. Other processes can read the unfinished operations no matter what happens to
this process.
"""

import itertools
import mmap
import struct
from pathlib import Path
from typing import NamedTuple

ROWS = 512
# Values of `seconds` for operations without a duration. OPEN_ASIDE: unfinished, in another thread.
# FAILED: the error is reported elsewhere.
OPEN, OPEN_ASIDE, FAILED = -1.0, -2.0, -3.0


class Row(NamedTuple):
    number: int  # starts at 1; 0 marks an empty row
    call: int
    t: float
    step: int
    first: int
    seconds: float


ROW = struct.Struct("<qqdqqd")
END = struct.Struct("<d")  # the last field, which changes at the end of the operation


class RingLog:
    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(ROWS * ROW.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._numbers = itertools.count(1)  # atomic, so threads do not need a lock
        self._begun = 0

    def begin(self, call: int, t: float, step: int, first: int, seconds: float) -> int:
        """Add a row for an operation that begins. Return the row's number."""
        number = self._begun = next(self._numbers)
        ROW.pack_into(self._map, number % ROWS * ROW.size, number, call, t, step, first, seconds)
        return number

    def end(self, number: int, seconds: float) -> None:
        if self._begun - number < ROWS:  # otherwise a newer row has overwritten it
            END.pack_into(self._map, (number % ROWS + 1) * ROW.size - END.size, seconds)


def read_ring_log(path: Path) -> list[Row]:
    """Return the rows in the order in which they began."""
    try:
        rows = map(Row._make, ROW.iter_unpack(path.read_bytes()))
        return sorted(row for row in rows if row.number)
    except (OSError, struct.error):
        return []
