"""A watched rank's operations, in two small files mapped into its memory: `OpenOperations` has the
current ones, and `RingLog` has the last few hundred. Writing does not need a system call, so it is
cheap enough for every step. Other processes can read both files even if this process hangs, holds
the GIL, or was killed.
"""

import itertools
import json
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

SIZE = 4096
HEAD = struct.Struct("<qi")  # the number of writes, the length of the text

ROWS = 512
ROW = struct.Struct("<qqdqqd")  # the fields of `Row`
END = struct.Struct("<d")  # the last field, which changes at the end of the operation
# Values of `seconds` for operations without a duration. OPEN_ASIDE: unfinished, in another thread.
# FAILED: the event log has the error.
OPEN, OPEN_ASIDE, FAILED = -1.0, -2.0, -3.0


def _map_new_file(path: Path, size: int) -> mmap.mmap:
    path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)


class OpenOperations:
    def __init__(self, path: Path) -> None:
        self._map = _map_new_file(path, SIZE)
        self.count = 0

    def write(self, text: bytes) -> None:
        """Write the text. While the text changes, the length is 0, and readers try again."""
        self.count += 1
        text = text[: SIZE - HEAD.size]
        HEAD.pack_into(self._map, 0, self.count, 0)
        self._map[HEAD.size : HEAD.size + len(text)] = text
        HEAD.pack_into(self._map, 0, self.count, len(text))


def read_open_operations(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of writes (0 if unreadable) and the open operations, outermost first."""
    try:
        raw = path.read_bytes()
        count, length = HEAD.unpack_from(raw)
        value = json.loads(raw[HEAD.size : HEAD.size + length]) if length else []
    except (OSError, ValueError, struct.error):
        return 0, []
    return count, value if isinstance(value, list) else []


class Row(NamedTuple):
    """One operation, as a few numbers. The event log describes what `call` refers to."""

    number: int  # starts at 1; 0 marks an empty row
    call: int
    t: float
    step: int
    first: int
    seconds: float


class RingLog:
    def __init__(self, path: Path) -> None:
        self._map = _map_new_file(path, ROWS * ROW.size)
        self._numbers = itertools.count(1)  # atomic, so threads do not need a lock
        self._begun = 0

    def begin(self, call: int, t: float, step: int, first: int, seconds: float) -> int:
        """Add a row for an operation that begins. Return the row's number."""
        number = self._begun = next(self._numbers)
        ROW.pack_into(self._map, number % ROWS * ROW.size, number, call, t, step, first, seconds)
        return number

    def end(self, number: int, seconds: float) -> None:
        if self._begun - number < ROWS:  # no newer row has overwritten this one
            END.pack_into(self._map, (number % ROWS + 1) * ROW.size - END.size, seconds)


def read_ring_log(path: Path) -> list[Row]:
    """Return the rows in the order in which they began."""
    try:
        rows = map(Row._make, ROW.iter_unpack(path.read_bytes()))
        return sorted(row for row in rows if row.number)
    except (OSError, struct.error):
        return []
