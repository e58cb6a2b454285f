"""`single`: the whole model on one device."""

from __future__ import annotations

import torch
from torch import nn

from paralab.worker.accumulation import accumulate
from paralab.worker.rank_context import Pass, RankContext


class Single:
    def __init__(self, job: RankContext, model: nn.Module) -> None:
        self.job, self.model = job, model.to(job.rank.devices[0].torch)

    def forward_backward(self, passes: list[Pass]) -> torch.Tensor:
        return accumulate(self.job, self.model, passes)
