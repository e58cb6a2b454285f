"""The last lines that were written, in a file of fixed size mapped into the process: what came just before an end or a hang.

Two halves are filled in turns, so that at least one half of the newest lines is always there.
"""

from __future__ import annotations

import mmap
import struct
import threading
from pathlib import Path

HALF = 1 << 16
HEAD = struct.Struct("<q")  # which half is being filled


class Recent:
    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.write(bytes(HEAD.size + 2 * HALF))
            file.flush()
            self._map = mmap.mmap(file.fileno(), HEAD.size + 2 * HALF)
        self._half, self._at = 0, 0
        self._lock = threading.Lock()

    def append(self, line: bytes) -> None:
        with self._lock:
            if self._at + len(line) + 1 > HALF:
                if len(line) + 1 > HALF:
                    return
                self._half, self._at = 1 - self._half, 0
                start = HEAD.size + self._half * HALF
                self._map[start : start + HALF] = bytes(HALF)
                HEAD.pack_into(self._map, 0, self._half)
            start = HEAD.size + self._half * HALF + self._at
            self._map[start : start + len(line)] = line
            self._map[start + len(line) : start + len(line) + 1] = b"\n"
            self._at += len(line) + 1


def read_recent(path: Path) -> list[bytes]:
    """The lines, oldest first."""
    try:
        raw = path.read_bytes()
    except OSError:
        return []
    if len(raw) < HEAD.size + 2 * HALF:
        return []
    newer = HEAD.unpack_from(raw)[0]
    halves = [raw[HEAD.size + half * HALF : HEAD.size + (half + 1) * HALF] for half in (1 - newer, newer)]
    return [line for half in halves for line in half.rpartition(b"\n")[0].split(b"\n") if line]
