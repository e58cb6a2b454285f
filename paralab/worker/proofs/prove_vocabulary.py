"""Prove that a split embedding or head computes what the plain one computes.

The samples may contain only some words, so the proof also looks up all of them. The proof of the
whole model then shows that its loss and gradients do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paralab.plan.vocabulary_groups import uneven_words
from paralab.worker.proofs.block_proof import Sharded, compare, largest_of, run_block
from paralab.worker.sharding.sharded_embedding import SplitEmbedding
from paralab.worker.sharding.sharded_layers import shard_group
from paralab.workload.linear_layers import Call
from paralab.workload.tensor_group import TensorGroup


class Vocabulary(nn.Module):
    """A group's embeddings and heads, without the layers between them."""

    def __init__(self, model: nn.Module, group: TensorGroup) -> None:
        super().__init__()
        self.layers = nn.ModuleList(model.get_submodule(name) for name in group.layers)

    def forward(self, *calls: Any) -> list[Any]:
        """Repeat the recorded calls of each layer, and look up all words in the embeddings."""
        results = [
            layer(*args, **kwargs)
            for layer, own in zip(self.layers, calls, strict=True)
            for args, kwargs in own
        ]
        for layer in self.layers:
            if isinstance(layer, nn.Embedding):
                kind = SplitEmbedding if isinstance(layer, SplitEmbedding) else nn.Embedding
                results.append(kind.forward(layer, torch.arange(layer.num_embeddings)))
        return results


def prove_vocabulary(
    model: nn.Module, group: TensorGroup, calls: Mapping[str, list[Call]], mesh: DeviceMesh
) -> TensorGroup:
    """Return the group with the result of its proof. `calls` has the recorded calls of its
    layers."""
    if reason := uneven_words(group, mesh.size()):
        return replace(group, reason=reason)
    whole = Vocabulary(model, group)
    names = {name: f"layers.{number}" for number, name in enumerate(group.layers)}
    alone = replace(
        group,
        block="",
        columns=tuple(names[name] for name in group.columns),
        row=names.get(group.row, ""),
        more_rows=tuple(names[name] for name in group.more_rows),
        tied=tuple(f"{own}.weight" for n, own in names.items() if f"{n}.weight" in group.tied),
    )
    recorded = [calls[name] for name in group.layers]
    arguments = [[call.arguments for call in each] for each in recorded]
    trained = [flag for each in recorded for call in each for flag in call.trained]
    all_calls = [Call((arguments, {}), trained)]

    def shard(block: nn.Module) -> Sharded:
        shard_group(block, alone, mesh)
        return Sharded()

    problem, errors = compare(whole, all_calls, run_block(whole, all_calls), shard)
    return replace(group, kept=not problem, error=largest_of(errors), reason=problem or "")
