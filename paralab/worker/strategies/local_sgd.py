"""`local-sgd`: one process per replica. Each replica takes optimizer steps on its own part of each
batch, and the replicas average their parameters every `sync_every` steps.

    step          0      1      2      3      4      5
    replica 0   step   step   step   step   step   step
    replica 1   step   step   step   step   step   step
                           average             average        --sync-every 3

A replica's weight in the average is its share of the samples (or of their weights) since the last
average. DiLoCo adds an outer optimizer. Its gradient is the difference between the last common
parameters and the average. Replicas never exchange their optimizer state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paralab.worker.groups import broadcast_model, group_of
from paralab.worker.rank_context import AccumulationStep, RankContext, Strategy


class LocalSgd(Strategy):
    def __init__(self, context: RankContext, model: nn.Module) -> None:
        device = context.rank.devices[0]
        self.context, self.model = context, model.to(device.torch)
        self.group, self.lossy = group_of(context.plan), context.plan.lossy
        broadcast_model(model, self.group)
        self.weight = 0.0  # this replica's shares of the batches since the last average
        self.share = 0.0  # this replica's share of the current batch
        self.steps = 0  # steps since the last average
        self.outer = OuterOptimizer(self) if self.lossy.has_outer_optimizer else None
        context.note_split.watch(self.model, device.name)

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        """Compute the gradient of the mean loss over this replica's own samples. Without samples,
        there are no gradients, so the optimizer changes nothing."""
        self.share = sum(micro.share for step in accumulation_steps for micro in step)
        self.weight += self.share
        if not self.share:
            return torch.zeros((), device=self.context.rank.devices[0].torch)
        own = [
            [replace(micro, share=micro.share / self.share) for micro in step]
            for step in accumulation_steps
        ]
        return self.accumulate(self.model, own) * self.share

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the sum of the replicas' gradients, each weighted by the replica's share."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in named.values()]
        have = torch.tensor([float(p.grad is not None) for p in named.values()])
        dist.all_reduce(have, group=self.group)
        summed = self._sum([grad * self.share for grad in grads])
        return {
            name: grad if count else None
            for name, grad, count in zip(named, summed, have.tolist(), strict=True)
        }

    def finish_step(self, step: int) -> None:
        self.steps += 1
        if self.lossy.synchronizes(step, self.context.plan.num_steps):
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average the parameters, step the outer optimizer, and copy the first replica's buffers
        (like DDP)."""
        parameters = self.trained
        # Do not round to fp16 or bf16 before the sum.
        wide = [p.to(torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        weight = torch.full_like(wide[0].flatten()[:1], self.weight)
        *summed, total = self._sum([*(each * self.weight for each in wide), weight])
        # If no sample had a weight, no replica changed its parameters.
        averages = [each / float(total) for each in summed] if total else parameters
        if self.outer:
            self.outer.step(averages)
        else:
            for parameter, average in zip(parameters, averages, strict=True):
                parameter.copy_(average)

        for number, buffer in enumerate(self.model.buffers()):
            if buffer.is_contiguous():
                note = self._begin("broadcast", buffer, number)
                dist.broadcast(buffer.view(-1).view(torch.uint8), 0, self.group)
                note()
        self.weight, self.steps = 0.0, 0

    def _sum(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Add up tensors over the ranks, with one all-reduce per dtype."""
        groups: dict[torch.dtype, list[int]] = defaultdict(list)
        for number, tensor in enumerate(tensors):
            groups[tensor.dtype].append(number)
        for bucket, numbers in enumerate(groups.values()):
            flat = torch.cat([tensors[n].flatten() for n in numbers])
            note = self._begin("all_reduce", flat, bucket)
            dist.all_reduce(flat, group=self.group)
            note()
            parts = flat.split([tensors[n].numel() for n in numbers])
            for n, part in zip(numbers, parts, strict=True):
                tensors[n] = part.view(tensors[n].shape)
        return tensors

    def _begin(self, kind: str, tensor: torch.Tensor, number: int) -> Any:
        begin = self.context.probe.begin_collective
        return begin(kind, tensor, self.group, bucket=number, blocking=True)

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return the average model, even if the launcher stopped the run between two averages."""
        if self.steps:
            self.synchronize()
        return super().state_dict()

    def own_state(self) -> dict[str, Any]:
        state = {"weight": self.weight, "steps": self.steps}
        return state | ({"outer": self.outer.state_dict()} if self.outer else {})

    def restore_own(self, state: dict[str, Any]) -> None:
        """Restore this rank's own state. If the checkpoint has none, training continues from the
        checkpoint's parameters with a new outer optimizer."""
        self.weight, self.steps = state.get("weight", 0.0), state.get("steps", 0)
        if self.outer:
            self.outer.load(self.trained, state.get("outer"))


class OuterOptimizer:
    """DiLoCo's outer step. `anchors` are the parameters after the last outer step."""

    def __init__(self, strategy: LocalSgd) -> None:
        self.strategy, lossy = strategy, strategy.lossy
        self.anchors = [nn.Parameter(p.detach().clone()) for p in strategy.trained]
        momentum = lossy.outer_momentum
        self.sgd = torch.optim.SGD(
            self.anchors, lossy.outer_lr, momentum=momentum, nesterov=momentum > 0
        )

    def step(self, averages: Iterable[torch.Tensor]) -> None:
        for anchor, average in zip(self.anchors, averages, strict=True):
            anchor.grad = anchor - average
        self.sgd.step()
        self.sgd.zero_grad()
        for parameter, anchor in zip(self.strategy.trained, self.anchors, strict=True):
            parameter.copy_(anchor)

    def state_dict(self) -> dict[str, Any]:
        return {
            "anchors": [anchor.detach() for anchor in self.anchors],
            "sgd": self.sgd.state_dict(),
        }

    @torch.no_grad()
    def load(self, parameters: list[nn.Parameter], state: dict[str, Any] | None) -> None:
        values = state["anchors"] if state else parameters
        for anchor, value in zip(self.anchors, values, strict=True):
            anchor.copy_(value)
        if state:
            self.sgd.load_state_dict(state["sgd"])
