"""Split an embedding by words: each shard looks up its own words, and the shards sum the results.

    words      3  0  5  1        shard 0 has words 0 … 2, shard 1 has words 3 … 5
    shard 0    0  a  0  b  ─┐
    shard 1    d  0  f  0  ─┴─► sum   d  a  f  b

torch's RowwiseParallel also does this, but computes the gradient of all words on each shard, and
keeps it there (torch 2.13). So it saves no memory for gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from paralab.worker.sharding.split_tensors import split_parameter, sum_over_shards


class SplitEmbedding(nn.Embedding):
    """This shard's part of an embedding: some of the words."""

    mesh: DeviceMesh

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        own = self.num_embeddings // self.mesh.size()
        first = own * self.mesh.get_local_rank()
        padding = None if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding in range(own) else None

        # Without this, a wrong number would be zero on all shards instead of an error.
        known = ((input >= 0) & (input < self.num_embeddings)).all()
        torch._assert_async(known, f"an embedding has {self.num_embeddings} words")
        elsewhere = (input < first) | (input >= first + own)
        rows = F.embedding((input - first).masked_fill(elsewhere, 0), weight.to_local(), padding)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        # The model may change the result in place, which autograd rejects for DTensor's view.
        return sum_over_shards(rows, self.mesh).clone()


class EmbeddingParallel(ParallelStyle):
    """Give each shard some of the words. A subclass of nn.Embedding keeps its own forward, whose
    `super().forward(words)` then calls that of `SplitEmbedding`."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        table: Any = module
        table.weight = split_parameter(table.weight, mesh, 0)
        table.mesh = mesh
        kind = type(table)
        kinds = (SplitEmbedding,) if kind is nn.Embedding else (kind, SplitEmbedding)
        table.__class__ = type(kind.__name__, kinds, {"__module__": kind.__module__})
        return module
