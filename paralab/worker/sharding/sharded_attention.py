"""Shard `nn.MultiheadAttention`, which uses its parameters directly instead of calling linear
layers. Each shard has some of the heads: their rows of q, k, and v, and their columns of the output
projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from paralab.worker.sharding.split_sequence import SplitSequence
from paralab.worker.sharding.split_tensors import Passage, passage, split_parameter


class MultiheadParallel(ParallelStyle):
    """Give each shard some of the heads, and make `forward` sum the results over the shards."""

    def __init__(self, sequence: SplitSequence | None = None) -> None:
        self.sequence = sequence

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        attention: Any = module
        for owner, name, dim, parts in (
            (attention, "in_proj_weight", 0, 3),
            (attention, "in_proj_bias", 0, 3),
            (attention.out_proj, "weight", 1, 1),
            (attention.out_proj, "bias", None, 1),
        ):
            if getattr(owner, name) is not None:
                setattr(owner, name, split_parameter(getattr(owner, name), mesh, dim, parts))

        between = passage(mesh, self.sequence)

        def forward(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            key_padding_mask: Tensor | None = None,
            need_weights: bool = True,
            attn_mask: Tensor | None = None,
            average_attn_weights: bool = True,
            is_causal: bool = False,
        ) -> tuple[Tensor, None]:
            if need_weights or query.ndim != 3:
                raise NotImplementedError("only batched inputs, with need_weights=False")
            mask = _add_masks(query, attention, mesh, key_padding_mask, attn_mask)
            return _attend((query, key, value), attention, between, mask), None

        attention.forward = forward
        return module


def _attend(
    inputs: tuple[Tensor, Tensor, Tensor], attention: Any, between: Passage, mask: Tensor | None
) -> Tensor:
    # Query, key, and value are often the same tensor.
    copies = {id(each): between.into(each) for each in inputs}
    weights = attention.in_proj_weight.to_local().chunk(3)
    bias = attention.in_proj_bias
    biases = [None] * 3 if bias is None else bias.to_local().chunk(3)
    parts = [
        F.linear(copies[id(each)], *own) for each, *own in zip(inputs, weights, biases, strict=True)
    ]
    if not attention.batch_first:
        parts = [part.transpose(0, 1) for part in parts]
    query, key, value = (
        part.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for part in parts
    )

    dropout = attention.dropout if attention.training else 0.0
    # Look the function up here, because a proof replaces it to turn off dropout.
    attended = F.scaled_dot_product_attention(query, key, value, mask, dropout)
    attended = attended.transpose(1, 2).flatten(2)
    attended = attended if attention.batch_first else attended.transpose(0, 1)
    projection = attention.out_proj
    result = between.out(F.linear(attended, projection.weight.to_local()))
    return result if projection.bias is None else result + projection.bias.to_local()


def _add_masks(
    query: Tensor,
    attention: Any,
    mesh: DeviceMesh,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> Tensor | None:
    """Return the sum of both masks for this shard's heads. In a boolean mask, True means that
    attention is not allowed."""
    masks = []
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    if attn_mask is not None and attn_mask.ndim == 3:  # the mask has one entry per sample and head
        per_head = attn_mask.unflatten(0, (-1, attention.num_heads))
        masks.append(per_head.chunk(mesh.size(), 1)[mesh.get_local_rank()])
    elif attn_mask is not None:
        masks.append(attn_mask)

    total: Tensor | None = None
    for mask in masks:
        if mask.dtype == torch.bool:
            mask = query.new_zeros(mask.shape).masked_fill(mask, float("-inf"))
        total = mask if total is None else total + mask
    return total
