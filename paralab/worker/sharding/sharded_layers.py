"""Shard a group's linear layers over a mesh: columns first, rows last.

    shard 0   x ─► columns 0 … 5   ─► heads 0 … 5   ─► rows 0 … 5   ─┐
    shard 1   x ─► columns 6 … 11  ─► heads 6 … 11  ─► rows 6 … 11  ─┴─► sum

Plain linear layers use torch's ColwiseParallel and RowwiseParallel. `MatrixParallel` splits layers
that those two cannot split: Hugging Face's Conv1D (whose weight is transposed), and matrices
side by side (q, k, and v), where each shard needs a piece of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from paralab.worker.sharding.sharded_attention import MultiheadParallel
from paralab.worker.sharding.sharded_embedding import EmbeddingParallel
from paralab.worker.sharding.shards import local
from paralab.worker.sharding.split_sequence import SplitSequence
from paralab.worker.sharding.split_tensors import passage, split_parameter
from paralab.workload.hooks import patched
from paralab.workload.tensor_group import TensorGroup

LOGITS = {True: Shard(-1), False: Replicate()}  # by whether the loss reads split logits


def shard_group(
    model: nn.Module,
    group: TensorGroup,
    mesh: DeviceMesh,
    block: str = "",
    sequence: SplitSequence | None = None,
) -> None:
    """Shard a group in place. `model` is the whole model, or a copy of its submodule `block`. With
    `sequence`, the row returns only a part of the sequence."""
    prefix = f"{block}." if block else ""
    for path, value in group.divided:
        owner, _, name = path.removeprefix(prefix).rpartition(".")
        setattr(model.get_submodule(owner), name, value)
    styles = {
        layer.removeprefix(prefix): _style_of(group, layer, sequence) for layer in group.layers
    }
    parallelize_module(model, mesh, styles)
    for path in group.tied:
        owner, _, name = path.removeprefix(prefix).rpartition(".")
        weight = model.get_submodule(group.row.removeprefix(prefix)).weight
        setattr(model.get_submodule(owner), name, weight)
    for path in group.summed:
        parameter = model.get_parameter(path.removeprefix(prefix))
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: functional.all_reduce(grad, "sum", mesh))


def _style_of(
    group: TensorGroup, layer: str, sequence: SplitSequence | None = None
) -> ParallelStyle:
    """Create the style that `TensorGroup.style_of` names."""
    if group.is_attention:
        return MultiheadParallel(sequence)
    if sequence:
        return MatrixParallel(group.parts, layer == group.row, sequence)
    if group.words and layer not in group.columns:
        return EmbeddingParallel()
    if group.words:
        split = group.split_loss
        return ColwiseParallel(use_local_output=not split, output_layouts=LOGITS[split])
    if layer == group.row:
        return MatrixParallel(rows=True) if group.own_style else RowwiseParallel()
    plain = group.parts == 1 and not group.own_style
    return ColwiseParallel() if plain else MatrixParallel(group.parts)


class MatrixParallel(ParallelStyle):
    """Split a layer's outputs or, with `rows`, its inputs. If the layer has `parts` matrices side
    by side, each shard gets a piece of each: q0 k0 v0 | q1 k1 v1, not q0 q1 k0 | k1 v0 v1."""

    def __init__(
        self, parts: int = 1, rows: bool = False, sequence: SplitSequence | None = None
    ) -> None:
        self.parts, self.rows, self.sequence = 1 if rows else parts, rows, sequence

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        layer: Any = module
        transposed = not isinstance(module, nn.Linear)
        dim = int(self.rows) ^ int(transposed)
        layer.weight = split_parameter(layer.weight, mesh, dim, self.parts)
        if layer.bias is not None:
            layer.bias = split_parameter(layer.bias, mesh, None if self.rows else 0, self.parts)

        between = passage(mesh, self.sequence)

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight = layer.weight.to_local()
            weight = weight.T if transposed else weight
            bias = None if layer.bias is None else layer.bias.to_local()
            if not self.rows:
                return nn.functional.linear(between.into(x), weight, bias)
            summed = between.out(nn.functional.linear(x, weight))
            # The model may change the result in place, which autograd rejects for DTensor's view.
            return summed.clone() if bias is None else summed + bias

        layer.forward = forward
        return module


@contextmanager
def mixing_tensors() -> Iterator[None]:
    """Let an optimizer combine split and replicated parameters, for example in a global norm.
    GradScaler unscales all gradients in one call, which does not accept both kinds, so pass it
    this rank's shards."""
    unscale = torch._amp_foreach_non_finite_check_and_unscale_

    def unscale_shards(gradients: list[torch.Tensor], *more: torch.Tensor) -> None:
        unscale([local(gradient) for gradient in gradients], *more)

    with implicit_replication():
        with patched(torch, _amp_foreach_non_finite_check_and_unscale_=unscale_shards):
            yield


def watch_regions(
    model: nn.Module,
    groups: Iterable[TensorGroup],
    enter: Callable[[str], None],
    leave: Callable[[str], None],
) -> None:
    """Call `enter` after a group's first column layer, and `leave` before its row layer, because
    activations between the two differ between shards. Both functions get the row layer's name."""
    for group in groups:
        if group.words:
            continue
        first, last = partial(_notify, enter, group.row), partial(_notify, leave, group.row)
        row = model.get_submodule(group.row)
        if group.is_attention:  # the region is the attention's forward
            row.register_forward_pre_hook(first)
            row.register_forward_hook(last)
            continue
        for name in group.columns:
            model.get_submodule(name).register_forward_hook(first)
        row.register_forward_pre_hook(last)


def _notify(call: Callable[[str], None], group: str, *_: Any) -> None:
    call(group)
