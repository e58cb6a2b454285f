"""Split the layers or the sequences of a fake model like rank 0 of a tensor- or context-parallel
run, in one process. Collectives of torch's `fake` backend return immediately."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn

from paralab.plan.plan import Plan
from paralab.worker.sharding.split_sequence import SplitSequence
from paralab.workload.recompute import MakeContext
from paralab.workload.tensor_group import TensorPlan

Recomputing = Callable[[nn.Module], MakeContext]  # as in RankContext


def _without_context(block: nn.Module) -> MakeContext:
    return nullcontext


def _begin(*_: Any) -> Callable[[], None]:
    return lambda: None


@contextmanager
def split_model(
    model: nn.Module, plan: Plan, fake: AbstractContextManager[Any]
) -> Iterator[Recomputing]:
    """In this context, the model has only the first shard of the layers that the plan splits, or
    the first part of the sequences. Yield additional contexts for recomputing blocks."""
    tensors, sequences = plan.tensor_plan, plan.sequence_plan
    split = tensors or sequences
    if split is None:
        yield _without_context
        return
    # These imports take half a second.
    import torch.distributed._tools.fake_collectives  # noqa: F401  shapes of their results
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=split.shards, store=FakeStore())
    try:
        if sequences:
            blocks = SplitSequence(model, sequences.kept, None, _begin, _begin)
            with blocks.attending():
                yield blocks.recomputing
        if tensors:
            with _split_layers(model, tensors, plan.device, fake) as sequence:
                yield sequence.recomputing if sequence else _without_context
    finally:
        dist.destroy_process_group()


@contextmanager
def _split_layers(
    model: nn.Module, plan: TensorPlan, device: str, fake: AbstractContextManager[Any]
) -> Iterator[SplitSequence | None]:
    from torch.distributed.device_mesh import init_device_mesh

    from paralab.worker.sharding.sharded_layers import mixing_tensors
    from paralab.worker.sharding.split_logits import reading_logits
    from paralab.worker.sharding.split_tokens import shard_groups

    mesh = init_device_mesh(device, (plan.shards,))
    with fake:
        blocks = plan.sequence.kept if plan.sequence else ()
        sequence = SplitSequence(model, blocks, None, _begin, _begin) if blocks else None
        shard_groups(model, plan.kept, mesh, sequence)
    with mixing_tensors(), reading_logits(plan.kept):
        yield sequence
