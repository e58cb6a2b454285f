"""Shared memory that all ranks in a group can read: three slots per rank.

A rank copies data into its own slot, and the others read it there. The memory has no name in a file
system on Linux, so it disappears with the last process, even after kill -9. It takes up to 6 MiB
per rank and group; pages that no collective has used take no memory. It does not count against
/dev/shm.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

import torch

from paralab.collectives.mesh import Mesh

SLOTS = 3
SLOT_BYTES = 2 * 2**20
NOTE_BYTES = 2**16  # before each slot
SIZE = struct.Struct("I")


class Staging:
    """The slots of every rank. `turn` counts the rounds of all collectives, so that every rank uses
    the same slot in the same round."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.turn = mesh.rank, 0
        file = _make_file(SLOTS * (NOTE_BYTES + SLOT_BYTES))
        files = {rank: peer.exchange_files([file])[0] for rank, peer in mesh.peers.items()}
        files[mesh.rank] = file
        self._memory = [mmap.mmap(files[rank], 0) for rank in range(mesh.size)]
        self._data = [
            torch.frombuffer(memory, dtype=torch.uint8).view(SLOTS, -1)[:, NOTE_BYTES:]
            for memory in self._memory
        ]
        for each in files.values():
            os.close(each)

    def slot(self, rank: int, round_number: int, dtype: torch.dtype) -> torch.Tensor:
        return self._data[rank][(self.turn + round_number) % SLOTS].view(dtype)

    def write_note(self, note: bytes) -> None:
        """Leave a note for the other ranks in this turn's slot."""
        place = self._place()
        self._memory[self.rank][place : place + SIZE.size + len(note)] = SIZE.pack(len(note)) + note

    def read_note(self, rank: int) -> bytes:
        place = self._place()
        (size,) = SIZE.unpack_from(self._memory[rank], place)
        first = place + SIZE.size
        return self._memory[rank][first : first + size]

    def _place(self) -> int:
        return (self.turn % SLOTS) * (NOTE_BYTES + SLOT_BYTES)


def _make_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("paralab")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file
