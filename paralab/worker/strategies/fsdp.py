"""`fsdp`: one process per replica with the real FSDP2 (`fully_shard`). Each rank has a shard of
every parameter, gradient, and optimizer state.

The diagram shows one accumulation step on one rank, for a model with two units (for example, two
blocks). An all-gather collects a unit's full parameters, which are freed after use:

    forward    [gather 0][ unit 0 ][gather 1][ unit 1 ]
    backward   [gather 1][ unit 1 ][gather 0][reduce-scatter 1][ unit 0 ][reduce-scatter 0]

With --zero 2, units stay gathered until their backward pass, which does not gather again. With
--shard-groups (HSDP), an all-reduce between the groups follows each reduce-scatter.

Losses are already weighted by their share of the global batch (`weighted_loss`), so
gradients are summed over ranks, not averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from paralab.worker.groups import broadcast_model, group_of, order_group
from paralab.worker.measure.memory import addresses
from paralab.worker.rank_context import (
    AccumulationStep,
    RankContext,
    Strategy,
    with_idle_steps,
)
from paralab.worker.sharding.collective_order import CollectiveOrder
from paralab.worker.sharding.sharded_units import (
    ShardedUnits,
    explain_dtypes,
    gathered_bytes,
    replica_mesh,
    stepping_on_shards,
)
from paralab.worker.sharding.split_layers import (
    align_shards,
    require_agreement,
    running_shards,
    split_layers,
)


class Fsdp(Strategy):
    def __init__(self, context: RankContext, model: nn.Module) -> None:
        plan, device = context.plan, context.rank.devices[0]
        self.context = context
        self.model: Any = model.to(device.torch)
        broadcast_model(model, group_of(plan))

        full = addresses(model.parameters())
        mesh = replica_mesh(plan, context.rank.rank)
        if plan.tensor_plan:
            split_layers(context, model, plan.tensor_plan.kept, mesh["shards"])
            mesh = mesh["replicas"]
            if plan.scaler:
                context.precision.agreed_over = group_of(plan)
        self.order = CollectiveOrder(order_group(plan, context.rank.rank), context.rank.rank)
        self.sharded = ShardedUnits(context, model, dict(model.named_modules()), mesh, self.order)
        context.meter.ignored -= full  # the full parameters are freed
        context.note_split.watch(self.model, device.name)

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        plan = self.context.plan
        steps = with_idle_steps(accumulation_steps, plan.accumulate)
        unsynchronized = nullcontext if plan.sync_every_pass else self._unsynchronized
        self.order.begin(self.context.probe.step)
        align_shards(self.context, self.model)
        with explain_dtypes(plan), running_shards(self.context):
            loss = self.accumulate(self.model, steps, unsynchronized)
        self.order.end()
        require_agreement(self.context, loss)
        return torch.zeros_like(loss) if self.context.rank.shard else loss

    @contextmanager
    def _unsynchronized(self) -> Iterator[None]:
        """Keep full gradients on all ranks. This saves communication, but needs more memory."""
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def stepping(self) -> AbstractContextManager[None]:
        return stepping_on_shards(self.context.plan)

    def transient_bytes(self) -> dict[str, int]:
        """Count the bytes of unsharded tensors that exist at the same time in a backward pass:
        gathered parameters, and gradients of one unit. With ZeRO-2, all units are gathered. If
        accumulation steps do not synchronize, the gradients of all units exist."""
        plan = self.context.plan
        if plan.shards_per_parameter == 1:
            return {}
        gradients = [unit.gradient_bytes for unit in self.sharded.units]
        together = plan.accumulate > 1 and not plan.sync_every_pass
        gathered = gathered_bytes([self.sharded], plan.zero)
        return {"gathered": gathered, "unreduced": (sum if together else max)(gradients)}
