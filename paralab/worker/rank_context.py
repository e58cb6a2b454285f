"""One training as one rank sees it: the workload, the plan, and the tools that every strategy
uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from paralab.plan.plan import Plan, RankPlan
from paralab.worker.memory import ActivationMeter
from paralab.worker.precision import Precision
from paralab.worker.probes import Probe
from paralab.worker.random_streams import Streams
from paralab.workload.batch import tensors
from paralab.workload.workload import Workload


@dataclass
class Micro:
    """Samples that pass through the model together, and their share of the global batch's loss."""

    inputs: Any
    targets: Any
    share: float


Pass = list[Micro]  # one backward pass: one micro-batch, or several that flow through the stages


@dataclass
class RankContext:
    plan: Plan
    rank: RankPlan
    workload: Workload
    precision: Precision
    probe: Probe
    meter: ActivationMeter
    show_split: Callable[[str, torch.device, torch.Size], None]
    streams: Streams | None = (
        None  # where threads draw random numbers: one stream per virtual device
    )

    def drawing(self, current: Callable[[], int]) -> AbstractContextManager[None]:
        """Random numbers of this block come from the stream of the virtual device `current()`."""
        return self.streams.drawing(current) if self.streams else nullcontext()

    def weighted_loss(self, output: Any, micro: Micro) -> torch.Tensor:
        """The micro-batch's part of the global loss: summed over micro-batches, passes and ranks it
        is the loss of the batch.

        Σ share · mean-loss with share = weight / total weight. A share of zero (nothing real in it:
        a mean over nothing is NaN) gives a zero that is still connected to the model.
        """
        if micro.share == 0.0:
            return torch.stack(
                [t.sum() * 0.0 for t in tensors(output) if t.is_floating_point()]
            ).sum()
        return self.workload.loss(output, micro.targets) * micro.share


class Strategy(Protocol):
    """How one rank trains. `model` is the user's module, which holds the parameters that the
    optimizer updates."""

    model: nn.Module

    def forward_backward(self, passes: list[Pass]) -> torch.Tensor:
        """Leave the gradient of the global batch in the parameters; return this rank's part of the
        loss."""
        ...
