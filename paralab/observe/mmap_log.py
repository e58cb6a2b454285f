"""A log file that is mapped into memory. Writing needs no system call and never waits, and a
killed process loses no lines.

The file grows in large pieces. Until it is closed, its unused end contains zeros.
"""

import errno
import mmap
import os
import threading
from pathlib import Path

PIECE = 1 << 18


class MmapLog:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)  # never overwrite
        self._at = 0
        self._size = 0
        self._map: mmap.mmap | None = None
        self._lock = threading.Lock()

    def append(self, line: bytes) -> None:
        """Append a line. Raise OSError if the disk is full. The line's newline is written last, so
        a reader sees only complete lines."""
        with self._lock:
            end = self._at + len(line)
            if end + 1 > self._size:
                self._grow(end + 1)
            assert self._map is not None
            self._map[self._at : end] = line
            self._map[end : end + 1] = b"\n"
            self._at = end + 1

    def _grow(self, needed: int) -> None:
        """Allocate disk blocks. In a file with holes, a write on a full disk kills the process."""
        size = needed + PIECE
        more = size - self._size
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file, self._size, more)
        elif os.pwrite(self._file, bytes(more), self._size) < more:  # macOS
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._map is not None:
            self._map.close()
        self._size, self._map = size, mmap.mmap(self._file, size)

    def close(self) -> None:
        with self._lock:
            if self._map is not None:
                self._map.close()
                self._map = None
                self._size = 0
            os.ftruncate(self._file, self._at)
            os.close(self._file)
