"""The last operations of a rank, those that are open among them, in a file of fixed size mapped into the process.

A row is a few numbers: which call it is (what `call` numbers stand for is written down once, in the journal), when it began, and
its numbers in the group. Two stores into memory, so it can be afforded in every step; what is open stays readable from outside,
whatever happens to the process.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

ROWS = 1024
HEAD = struct.Struct("<q")  # how many rows were begun
ROW = struct.Struct("<qqdqqdq")  # its number (from 1; 0: empty), call, t, step, first, seconds, last
END = struct.Struct("<dq")  # the last two, which change when it is over
OPEN, OPEN_ASIDE, FAILED = -1.0, -2.0, -3.0  # instead of seconds; aside: in another thread; failed: told elsewhere


@dataclass(frozen=True)
class Row:
    number: int
    call: int
    t: float
    step: int
    first: int
    seconds: float
    last: int


class Recent:
    def __init__(self, path: Path) -> None:
        size = HEAD.size + ROWS * ROW.size
        with path.open("w+b") as file:
            file.write(bytes(size))
            file.flush()
            self._map = mmap.mmap(file.fileno(), size)
        self._numbers = itertools.count(1)  # one step of the interpreter: threads need no lock
        self.begun = 0

    def begin(self, call: int, t: float, step: int, first: int, seconds: float, last: int) -> int:
        """A new row; its number."""
        number = self.begun = next(self._numbers)
        ROW.pack_into(self._map, HEAD.size + number % ROWS * ROW.size, number, call, t, step, first, seconds, last)
        HEAD.pack_into(self._map, 0, number)
        return number

    def end(self, number: int, seconds: float, last: int) -> None:
        if self.begun - number < ROWS:  # else its place was taken meanwhile
            END.pack_into(self._map, HEAD.size + (number % ROWS + 1) * ROW.size - END.size, seconds, last)


def read_recent(path: Path) -> tuple[int, list[Row]]:
    """(how many rows were begun, the last of them in the order in which they began)."""
    try:
        raw = path.read_bytes()
        begun = HEAD.unpack_from(raw)[0]
        rows = [Row(*row) for row in ROW.iter_unpack(raw[HEAD.size :]) if row[0]]
    except (OSError, struct.error):
        return 0, []
    return begun, sorted(rows, key=lambda row: row.number)
