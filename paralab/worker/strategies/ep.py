"""`ep`: one process per shard. Each process trains on its own samples, and has some of the experts.

    forward    [ attention ][a2a][ experts ][a2a] …
    backward   … [a2a][ experts ][a2a][ attention ][all-reduce]

The experts' gradients are complete, because the tokens of all processes reach them. After the last
backward pass, the processes sum all other gradients, as in `ddp`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paralab.worker.groups import broadcast_model, group_of, order_group
from paralab.worker.measure.memory import addresses
from paralab.worker.rank_context import (
    AccumulationStep,
    RankContext,
    Strategy,
    with_idle_steps,
)
from paralab.worker.sharding.collective_order import CollectiveOrder
from paralab.worker.sharding.sharded_layers import mixing_tensors
from paralab.worker.sharding.shards import local
from paralab.worker.sharding.split_experts import SplitExperts


class Ep(Strategy):
    def __init__(self, context: RankContext, model: nn.Module) -> None:
        plan, device, group = context.plan, context.rank.devices[0], group_of(context.plan)
        assert plan.expert_plan is not None
        self.context, self.model = context, model.to(device.torch)
        broadcast_model(model, group)

        full = addresses(model.parameters())
        mesh = DeviceMesh.from_group(group, plan.device, mesh_dim_names=("shards",))
        self.order = CollectiveOrder(order_group(plan, context.rank.rank), context.rank.rank, "ep")
        self.split = SplitExperts(model, plan.expert_plan.kept, mesh, self._begin)
        context.meter.ignored -= full
        context.meter.ignored |= addresses(map(local, model.parameters()))
        if plan.scaler:
            context.precision.agreed_over = group
        context.note_split.watch(self.model, device.name)

    def _begin(
        self, kind: str, tensor: torch.Tensor, group: dist.ProcessGroup, unit: str, layer: str
    ) -> Callable[[], None]:
        self.order.announce(f"send {unit} for {layer}")
        return self.context.probe.begin_inside(kind, tensor, group, unit)

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        self.order.begin(self.context.probe.step)
        steps = with_idle_steps(accumulation_steps, self.context.plan.accumulate)
        loss = self.accumulate(self.model, steps)
        self.order.end()
        self.split.sum_gradients(self.context.probe.begin_collective)
        return loss

    def stepping(self) -> AbstractContextManager[Any]:
        return mixing_tensors()
