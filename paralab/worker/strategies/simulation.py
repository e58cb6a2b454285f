"""`verify`'s reference for lossy configurations: the same algorithm on one device, one replica at a
time, without communication. It shares no code with the strategies that it verifies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paralab.plan.lossy import CASTS, POWERSGD_START, Simulation
from paralab.worker.optimizer import make_optimizer, make_scheduler
from paralab.worker.power_sgd import compress, starting_vectors
from paralab.worker.rank_context import AccumulationStep, RankContext, Strategy

Tensors = dict[str, torch.Tensor]
ROUNDED = {"fp16": torch.float16, "bf16": torch.bfloat16}


class OneDevice(Strategy):
    """A model on one device that multiple replicas use in turn."""

    def __init__(self, context: RankContext, model: nn.Module, simulation: Simulation) -> None:
        self.context, self.simulation = context, simulation
        self.model = model.to(context.rank.devices[0].torch)
        self.parameters = dict(self.model.named_parameters())
        self.replicas = range(simulation.replicas)

    def train_replica(self, steps: list[AccumulationStep], replica: int) -> torch.Tensor:
        """Compute the gradients of this replica's samples."""
        self.model.zero_grad(set_to_none=True)
        own = [step for step in steps if step[0].replica == replica]
        return self.accumulate(self.model, own)

    def take_gradients(self) -> Tensors:
        return {n: p.grad.clone() for n, p in self.parameters.items() if p.grad is not None}


class SimulatedDdp(OneDevice):
    """`ddp --compress`: compress the replicas' gradients, and sum them in order."""

    def __init__(self, context: RankContext, model: nn.Module, simulation: Simulation) -> None:
        super().__init__(context, model, simulation)
        self.steps = 0
        self.vectors: dict[str, torch.Tensor | None] = {}  # PowerSGD's Q
        self.unsent: dict[
            tuple[str, int], torch.Tensor
        ] = {}  # PowerSGD's approximation errors, by replica

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        losses, gradients = [], []
        for replica in self.replicas:
            losses.append(self.train_replica(accumulation_steps, replica))
            gradients.append(self.take_gradients())
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                continue
            zero = torch.zeros_like(parameter)
            total = self._combine(name, [own.get(name, zero) for own in gradients])
            # DDP ignores the result for a parameter that no replica used in this step.
            parameter.grad = total if any(name in own for own in gradients) else None
        self.steps += 1
        return torch.stack(losses).sum()

    def _combine(self, name: str, gradients: list[torch.Tensor]) -> torch.Tensor:
        kind = self.simulation.compress
        if kind in CASTS:
            rounded = [gradient.to(ROUNDED[kind]).float() for gradient in gradients]
            return _add(rounded).to(ROUNDED[kind]).to(gradients[0])
        if self.steps < POWERSGD_START:
            return _add(gradients)
        return self._low_rank(name, gradients)

    def _low_rank(self, name: str, gradients: list[torch.Tensor]) -> torch.Tensor:
        shape = gradients[0].shape
        matrices = [len(self.replicas) * each.reshape(shape[0], -1) for each in gradients]
        if name not in self.vectors:
            seed = self.context.plan.seed + list(self.parameters).index(name)
            self.vectors[name] = starting_vectors(matrices[0], self.simulation.powersgd_rank, seed)
        vectors = self.vectors[name]
        if vectors is None:
            return _add(gradients)
        matrices = [each + self.unsent.get((name, r), 0.0) for r, each in enumerate(matrices)]
        mean, self.vectors[name] = compress(matrices, vectors)
        self.unsent |= {(name, r): each - mean for r, each in enumerate(matrices)}
        return mean.reshape(shape)


class SimulatedLocalSgd(OneDevice):
    """`local-sgd`: each replica has its own parameters, optimizer, and scheduler.

    The training loop's optimizer also steps, but its changes are overwritten.
    """

    def __init__(self, context: RankContext, model: nn.Module, simulation: Simulation) -> None:
        super().__init__(context, model, simulation)
        self.common = self._copy()
        self.own = [self._copy() for _ in self.replicas]
        self.velocity = {name: torch.zeros_like(p) for name, p in self.common.items()}
        self.optimizers = [make_optimizer(context.workload, self.model) for _ in self.replicas]
        self.schedulers: list[Any] = [
            make_scheduler(context.workload, optimizer) for optimizer in self.optimizers
        ]
        self.weights = [0.0 for _ in self.replicas]

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        total: Tensors = {}
        for replica in self.replicas:
            steps = [step for step in accumulation_steps if step[0].replica == replica]
            share = sum(micro.share for step in steps for micro in step)
            self.weights[replica] += share
            self._load(self.own[replica])
            self.model.zero_grad(set_to_none=True)
            if share:
                scaled = [[replace(m, share=m.share / share) for m in step] for step in steps]
                losses.append(self.train_replica(scaled, replica) * share)
            for name, gradient in self.take_gradients().items():
                total[name] = total.get(name, 0.0) + share * gradient
            self.optimizers[replica].step()
            if self.schedulers[replica]:
                self.schedulers[replica].step()
            self.own[replica] = self._copy()

        for name, parameter in self.parameters.items():
            parameter.grad = total.get(name)
        return torch.stack(losses).sum() if losses else torch.zeros(())

    @torch.no_grad()
    def finish_step(self, step: int) -> None:
        """Average every `sync_every` steps and at the end, and run DiLoCo's outer step."""
        every, plan = self.simulation.sync_every, self.context.plan
        assert every
        if (step + 1) % every == 0 or step + 1 == plan.num_steps:
            for name, common in self.common.items():
                values = [own[name] for own in self.own]
                if weight := sum(self.weights):
                    each = [w / weight * v for w, v in zip(self.weights, values, strict=True)]
                    self.common[name] = self._outer_step(name, common, common - _add(each))
            self.own = [dict(self.common) for _ in self.replicas]
            self.weights = [0.0 for _ in self.replicas]
        self._load(self.own[0])

    def _outer_step(self, name: str, value: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        """Apply SGD with Nesterov momentum to the average change since the last outer step."""
        lr, momentum = self.simulation.outer_lr, self.simulation.outer_momentum
        self.velocity[name] = momentum * self.velocity[name] + change
        return value - lr * (change + momentum * self.velocity[name])

    def _copy(self) -> Tensors:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def _load(self, values: Tensors) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])


def simulate(context: RankContext, model: nn.Module, simulation: Simulation) -> Strategy:
    kind = SimulatedLocalSgd if simulation.sync_every else SimulatedDdp
    return kind(context, model, simulation)


def _add(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total
