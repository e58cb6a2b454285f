"""Split a fake model like rank 0 of a tensor-parallel run, in one process. Collectives of torch's
`fake` backend return immediately."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from paralab.plan.plan import Plan


@contextmanager
def split_layers(model: nn.Module, plan: Plan, fake: AbstractContextManager[Any]) -> Iterator[None]:
    """In this block, the model has only the first shard of the layers that the plan splits."""
    if plan.tensor_plan is None:
        yield
        return
    # These imports take half a second.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from paralab.worker.sharded_layers import mixing_tensors, reading_logits, shard_group

    shards = plan.tensor_plan.shards
    dist.init_process_group("fake", rank=0, world_size=shards, store=FakeStore())
    try:
        mesh = init_device_mesh(plan.device, (shards,))
        with fake:
            for group in plan.tensor_plan.kept:
                shard_group(model, group, mesh)
        with mixing_tensors(), reading_logits(plan.tensor_plan.kept):
            yield
    finally:
        dist.destroy_process_group()
