"""Sequence parallelism: split layers, and let each shard compute everything between them (norms,
dropout, residuals) for its part of the tokens.

    without    columns ► heads ► rows ─► all-reduce       ─► residual, norm (all tokens)
    with       columns ► heads ► rows ─► reduce-scatter   ─► residual, norm (its tokens) ─► all-gather

An all-reduce moves as many bytes as the other two together, so this saves memory for the same
communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paralab.worker.sharding.sharded_layers import shard_group
from paralab.worker.sharding.split_sequence import SplitSequence
from paralab.workload.sequence_plan import SplitBlock
from paralab.workload.tensor_group import TensorGroup


def contains(block: SplitBlock, group: TensorGroup) -> bool:
    return not group.words and (not block.name or group.row.startswith(f"{block.name}."))


def shard_groups(
    model: nn.Module,
    groups: Sequence[TensorGroup],
    mesh: DeviceMesh,
    sequence: SplitSequence | None,
) -> None:
    """Shard the groups in place. In the blocks of `sequence`, split the tokens between them."""
    blocks = sequence.blocks if sequence else ()
    for group in groups:
        inside = any(contains(block, group) for block in blocks)
        shard_group(model, group, mesh, sequence=sequence if inside else None)
    if sequence:
        sequence.parameters = list(_with_partial_gradients(model, groups, blocks))


def _with_partial_gradients(
    model: nn.Module, groups: Sequence[TensorGroup], blocks: Sequence[SplitBlock]
) -> Iterator[nn.Parameter]:
    """Yield the blocks' parameters that get gradients only from this shard's tokens. These are all
    except those of the split layers and of modules that get the whole sequence."""
    split = {f"{layer}.weight" for group in groups for layer in group.layers}
    split |= {f"{layer}.bias" for group in groups for layer in group.columns}
    split |= {name for group in groups for name in group.summed}
    rows = {f"{g.row}{'.out_proj' * g.is_attention}.bias" for g in groups}
    for block in blocks:
        start = f"{block.name}." if block.name else ""
        joined = tuple(f"{start}{name}." for name in block.joined)
        for name, parameter in model.get_submodule(block.name).named_parameters(start[:-1]):
            is_whole = name.startswith(joined) and name not in rows
            if name not in split and not is_whole:
                yield parameter
