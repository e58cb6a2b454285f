"""Random numbers under tensor parallelism.

All shards compute the same activations, except between a group's columns and its row, where each
shard has its own heads. So dropout must draw the same numbers on all shards, but different numbers
in that region. On entry, all shards draw the same seed and each adds its own number. On exit, the
common stream continues. Everything follows from the common stream, so a checkpoint and a recomputed
forward pass need nothing more than its state.
"""

from __future__ import annotations

import torch

SEEDS = 2**48  # seeds are below this number


class ShardStreams:
    def __init__(self, shard: int, device: torch.device) -> None:
        self.shard = shard
        gpu = device.type == "cuda"
        generators = torch.cuda.default_generators
        self.generator = generators[device.index or 0] if gpu else torch.default_generator
        self.device = device
        self.common: torch.Tensor | None = None  # the common state, within a region

    def enter(self) -> None:
        if self.common is None:
            seed = torch.randint(
                SEEDS, (), generator=self.generator, device=self.device, dtype=torch.int64
            )
            self.common = self.generator.get_state()
            self.generator.manual_seed((int(seed) + 1_000_003 * (1 + self.shard)) % SEEDS)

    def leave(self) -> None:
        if self.common is not None:
            self.generator.set_state(self.common)
            self.common = None
