"""Random numbers under tensor parallelism.

All shards compute the same activations, except between a group's columns and its row, where each
shard has its own heads. So dropout must draw different numbers in that region, but the same numbers
everywhere else. On entry, all shards draw the same seed, and each adds its own number. On exit, the
common stream continues.

Activation checkpointing restores the generator's state and recomputes only a part of a forward
pass, which may begin or end within a region. So the generator's state must identify the region:
each region has its own seed, which is part of the state. All seeds derive from the common stream,
so a checkpoint of a run only needs that stream's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

SEEDS = 2**48  # seeds are below this number


class Region(NamedTuple):
    """The random numbers of one call of a group, and the stream that continues after it."""

    group: str  # the name of the row layer
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
        """Forget the regions of earlier passes. A forward pass that called a column layer but not
        the row layer may still be in a region."""
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
        """Leave the group's region. If another group's region began inside it, keep drawing in the
        inner region until that ends too."""
        for seed in self._around():
            if self.regions[seed].group == group:
                self.left.add(seed)
        self._go_out()

    def _around(self) -> Iterator[int]:
        """Yield the seeds of the regions that the generator is in, innermost first."""
        seed = self.generator.initial_seed()
        while seed in self.regions:
            yield seed
            seed = self.regions[seed].seed_outside

    def _go_out(self) -> None:
        """Continue the stream outside the finished regions."""
        for seed in [*self._around()]:
            if seed not in self.left:
                return
            self.generator.set_state(self.regions[seed].outside)
