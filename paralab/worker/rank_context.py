"""One rank's view of a run: its plan, its workload, and tools that all strategies share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paralab.plan.plan import Plan, RankPlan
from paralab.worker.memory import ActivationMeter
from paralab.worker.precision import Precision
from paralab.worker.probes import Probe
from paralab.worker.random_streams import RandomStreams
from paralab.worker.shards import whole
from paralab.worker.split_notes import SplitNotes
from paralab.workload.batch import tensors
from paralab.workload.workload import Workload


@dataclass
class MicroBatch:
    """Samples that pass through the model together, and their share of the global loss."""

    inputs: Any
    targets: Any
    share: float


# One accumulation step processes one micro-batch, or several that fill a pipeline.
AccumulationStep = list[MicroBatch]


@dataclass
class RankContext:
    plan: Plan
    rank: RankPlan
    workload: Workload
    precision: Precision
    probe: Probe
    meter: ActivationMeter
    note_split: SplitNotes
    streams: RandomStreams | None = None  # one per virtual device, if threads draw numbers

    def drawing(self, current: Callable[[], int]) -> AbstractContextManager[None]:
        """Draw random numbers from the stream for virtual device `current()` in this block."""
        return self.streams.drawing(current) if self.streams else nullcontext()

    def weighted_loss(self, output: Any, micro: MicroBatch) -> torch.Tensor:
        """Return this micro-batch's part of the global loss: Σ share · loss is the batch's loss.

        The share is the micro-batch's weight divided by the global batch's weight. A share of zero
        means that the micro-batch has no real samples. A mean over no samples is NaN, so return a
        zero that is still connected to the model.
        """
        if micro.share == 0.0:
            return torch.stack(
                [t.sum() * 0.0 for t in tensors(output) if t.is_floating_point()]
            ).sum()
        return self.workload.loss(output, micro.targets) * micro.share


class Strategy(ABC):
    """How one rank trains. `model` is the user's module; the optimizer updates its parameters."""

    context: RankContext
    model: nn.Module

    @abstractmethod
    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        """Leave the global batch's gradients in the parameters and return this rank's part of the
        loss."""

    def device_parameters(self, device: str) -> list[nn.Parameter]:
        """The parameters that are on this device."""
        return list(self.model.parameters())

    def transient_bytes(self) -> dict[str, int]:
        """Memory that the strategy needs only during part of a step, by kind."""
        return {}

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """The full model's state on rank 0. All ranks must call this: each may have a shard."""
        return {name: whole(value) for name, value in self.model.state_dict().items()}
