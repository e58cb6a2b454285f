"""CPU memory that all ranks in a group can read: three slots per rank.

A rank copies data into its own slot, where the other ranks read it. `GpuStaging` has the same
interface for CUDA tensors.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch

from paralab.collectives.mesh import Mesh
from paralab.collectives.shared_memory import share_memory

SLOTS = 3


class Staging:
    """The slots of every rank. `turn` counts the rounds of all collectives, so that every rank uses
    the same slot in the same round."""

    slot_bytes = 2 * 2**20
    small_bytes = 64 * 2**10
    few_ranks = 2

    def __init__(self, mesh: Mesh) -> None:
        self.turn = 0
        self.ranks = mesh.size
        self._data = [_as_slots(each) for each in share_memory(mesh, SLOTS * self.slot_bytes)]

    def slot(self, rank: int, round_number: int, dtype: torch.dtype) -> torch.Tensor:
        return self._data[rank][(self.turn + round_number) % SLOTS].view(dtype)

    def fit(self, size: int) -> None:
        """Prepare for a collective of this size, which is the same on all ranks."""

    def meets_once(self, size: int) -> bool:
        """Return whether each rank reduces everything itself. This saves one of two
        synchronizations, but each rank reads more."""
        return self.ranks <= self.few_ranks or size <= self.small_bytes

    def meet(self, meet: Callable[[], None]) -> None:
        """Wait until all ranks have finished their work on the slots."""
        meet()


def _as_slots(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8).view(SLOTS, -1)
