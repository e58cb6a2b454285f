"""Memory that all ranks in a group can read, and short notes in it.

On Linux, the memory has no name in a file system, so it disappears with the last process, even
after kill -9. It does not count against the size of /dev/shm, and unused pages take no memory.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

from paralab.collectives.mesh import Mesh

NOTE_BYTES = 2**16
NOTES = 2
SIZE = struct.Struct("I")


def share_memory(mesh: Mesh, size: int) -> list[mmap.mmap]:
    """Return each rank's block of memory, which that rank writes and all ranks read."""
    file = _make_file(size)
    files = {mesh.rank: file, **mesh.exchange_files(dict.fromkeys(mesh.peers, file))}
    memory = [mmap.mmap(files[rank], 0) for rank in range(mesh.size)]
    for each in files.values():
        os.close(each)
    return memory


class Notes:
    """One note per rank and call. A rank may overwrite its note two calls later, because all ranks
    read it before they synchronize in the next call."""

    def __init__(self, mesh: Mesh) -> None:
        self._rank = mesh.rank
        self._memory = share_memory(mesh, NOTES * NOTE_BYTES)

    def write(self, call: int, note: bytes) -> None:
        place = call % NOTES * NOTE_BYTES
        self._memory[self._rank][place : place + SIZE.size + len(note)] = (
            SIZE.pack(len(note)) + note
        )

    def read(self, call: int, rank: int) -> bytes:
        first = call % NOTES * NOTE_BYTES + SIZE.size
        (size,) = SIZE.unpack_from(self._memory[rank], first - SIZE.size)
        return self._memory[rank][first : first + size]


def _make_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("paralab")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file
