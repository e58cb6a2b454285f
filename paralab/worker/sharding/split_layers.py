"""Split layers over the shards, and time the collectives between shards.

DTensor splits the proved groups of layers. The rest of the model is replicated: all shards process
the same samples, compute the same loss, and get the same gradients for replicated parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from paralab.errors import ParalabError
from paralab.worker.groups import broadcast_model, group_along, ranks_with
from paralab.worker.rank_context import RankContext
from paralab.worker.sharding.shard_streams import ShardStreams
from paralab.worker.sharding.sharded_layers import watch_regions
from paralab.worker.sharding.split_logits import reading_logits
from paralab.worker.sharding.split_sequence import SplitSequence
from paralab.worker.sharding.split_tokens import shard_groups
from paralab.workload.hooks import patched
from paralab.workload.tensor_group import TensorGroup

# Newer versions of torch renamed the all-gather that DTensor calls.
GATHER = next(n for n in ("all_gather_single", "all_gather_tensor") if hasattr(functional, n))
AGREEMENT = 1e-3  # how much rounding may change the loss
# Replicated parameters get the same gradient on all shards, except for rounding (GPU kernels add in
# any order). Copy these parameters from the first shard before the differences grow.
ALIGN_EVERY = 100  # steps


def split_layers(
    context: RankContext,
    model: nn.Module,
    groups: Sequence[TensorGroup],
    mesh: DeviceMesh,
    sequence: SplitSequence | None = None,
) -> None:
    """Split these groups in place, and the tokens between them if there is a `sequence`. Between
    columns and row, each shard draws different numbers."""
    shard_groups(model, groups, mesh, sequence)
    if context.plan.draws:
        device = torch.device(context.rank.devices[0].torch)
        context.shard_streams = streams = ShardStreams(context.rank.shard or 0, device)
        watch_regions(model, groups, streams.enter, streams.leave)
        if sequence:
            sequence.streams = streams


@contextmanager
def running_shards(context: RankContext) -> Iterator[None]:
    """Time DTensor's collectives over the shards in forward and backward passes, and let the loss
    read split logits."""
    if context.shard_streams:
        context.shard_streams.begin_passes()
    plan, rank, probe = context.plan, context.rank, context.probe
    if plan.tensor_plan is None:
        yield
        return
    group = group_along(plan, "shards", rank.rank)
    where: dict[str, Any] = {"stage": rank.stage, "ranks": ranks_with(plan, "shards", rank.rank)}

    def timed(kind: str, collective: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            """Wait for the result here, because DTensor uses it immediately anyway."""
            # DTensor communicates inside autograd functions, which never record a graph.
            in_backward = torch._C._current_graph_task_id() != -1
            repeats_forward = not in_backward or context.is_recomputing
            unit = "activations" if repeats_forward else "gradients"
            note = probe.begin_inside(kind, tensor, group, unit, **where)
            result: torch.Tensor = functional.wait_tensor(collective(tensor, *args, **kwargs))
            note()
            return result

        return run

    names = {"all_reduce": "all_reduce", GATHER: "all_gather"}
    collectives = {name: timed(kind, getattr(functional, name)) for name, kind in names.items()}
    with patched(functional, **collectives), reading_logits(plan.tensor_plan.kept):
        yield


def align_shards(context: RankContext, model: nn.Module) -> None:
    """Copy replicated tensors from the first shard in every `ALIGN_EVERY`-th step."""
    step = context.probe.step
    if context.rank.shard is not None and step and step % ALIGN_EVERY == 0:
        broadcast_model(model, group_along(context.plan, "shards", context.rank.rank))


def require_agreement(context: RankContext, loss: torch.Tensor) -> None:
    """Raise if the shards' losses differ: they read different samples, took different branches, or
    drew different random numbers. Training would continue with meaningless gradients."""
    if context.rank.shard is None:
        return
    both = torch.stack([loss, -loss]).double().nan_to_num()
    group = group_along(context.plan, "shards", context.rank.rank)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    largest, smallest = both[0].item(), -both[1].item()
    if largest - smallest > AGREEMENT * max(abs(largest), abs(smallest)):
        raise ParalabError(
            f"The shards disagree on the loss of step {context.probe.step}: between {smallest:.6g} "
            f"and {largest:.6g}. All shards must read the same samples and compute the same "
            "activations.",
            fix="data and a forward that are the same in every process (a set of strings has a "
            "different order in each one)",
        )
