"""Random numbers under tensor parallelism.

All shards compute the same activations, except between a group's columns and its row, where each
shard has its own heads. So dropout must draw the same numbers on all shards, but different numbers
in that region. On entry, all shards draw the same seed and each adds its own number. On exit, the
stream outside continues.

Activation checkpointing restores the generator's state and computes only a part of a forward pass
again. That part may begin or end within a region. So the generator itself says in which region it
is: each region has its own seed, which is a part of the state. Everything follows from the common
stream, so a checkpoint of a run needs nothing more than its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

SEEDS = 2**48  # seeds are below this number


class Region(NamedTuple):
    """Where one call of a group draws its numbers, and how the stream outside it continues."""

    group: str  # its row
    outside: torch.Tensor
    seed_outside: int


class ShardStreams:
    def __init__(self, shard: int, device: torch.device) -> None:
        self.shard = shard
        gpu = device.type == "cuda"
        generators = torch.cuda.default_generators
        self.generator = generators[device.index or 0] if gpu else torch.default_generator
        self.device = device
        self.regions: dict[int, Region] = {}  # seed -> region
        self.left: set[int] = set()

    def begin_passes(self) -> None:
        """Forget the regions of earlier passes. The last one may have entered a region without
        leaving it, if its forward pass called a column layer and not the row."""
        for seed in self._around():
            self.left.add(seed)
        self._go_out()
        self.regions.clear()
        self.left.clear()

    def enter(self, group: str) -> None:
        if any(self.regions[seed].group == group for seed in self._around()):
            return
        outside = self.generator.initial_seed()
        drawn = torch.randint(
            SEEDS, (), generator=self.generator, device=self.device, dtype=torch.int64
        )
        seed = (int(drawn) + 1_000_003 * (1 + self.shard)) % SEEDS
        self.regions[seed] = Region(group, self.generator.get_state(), outside)
        self.generator.manual_seed(seed)

    def leave(self, group: str) -> None:
        """Leave the group's region. If another group's region began in it, draw there until that
        one ends too."""
        for seed in self._around():
            if self.regions[seed].group == group:
                self.left.add(seed)
        self._go_out()

    def _around(self) -> Iterator[int]:
        """Yield the seeds of the regions that the generator is in, from the inside out."""
        seed = self.generator.initial_seed()
        while seed in self.regions:
            yield seed
            seed = self.regions[seed].seed_outside

    def _go_out(self) -> None:
        """Continue the stream outside the regions that were left."""
        for seed in [*self._around()]:
            if seed not in self.left:
                return
            self.generator.set_state(self.regions[seed].outside)
