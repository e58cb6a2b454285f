"""`single`: the entire model on one device."""

from __future__ import annotations

import torch
from torch import nn

from paralab.worker.rank_context import AccumulationStep, RankContext, Strategy


class Single(Strategy):
    def __init__(self, context: RankContext, model: nn.Module) -> None:
        device = context.rank.devices[0]
        self.context, self.model = context, model.to(device.torch)
        context.note_split.watch(self.model, device.name)

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        return self.accumulate(self.model, accumulation_steps)
