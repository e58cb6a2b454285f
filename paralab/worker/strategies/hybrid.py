"""`hybrid`: data parallelism between processes. Each process runs a pipeline on its own devices.

Each stage has its own DistributedDataParallel in its own process group. Stages finish at different
times, but each collective must match the same stage's collective on other ranks. DDP sees only the
last micro-batch's backward pass, and earlier gradients are only accumulated. So ranks synchronize
once per optimizer step, while earlier stages still compute.
"""

from __future__ import annotations

import torch
from torch import nn

from paralab.worker.groups import group_of
from paralab.worker.rank_context import AccumulationStep, RankContext
from paralab.worker.strategies.ddp import Reduction, require_reduced, wrap
from paralab.worker.strategies.pipeline_threads import PipelineThreads


class Hybrid(PipelineThreads):
    def __init__(self, context: RankContext, model: nn.Module) -> None:
        super().__init__(context, model)
        self.replicated: dict[int, nn.Module] = {}  # stage -> DDP, unless the stage is frozen
        self.reductions: list[Reduction] = []
        for stage in range(context.plan.stages):
            parameters = self.stage_parameters(stage)
            if any(parameter.requires_grad for parameter in parameters):
                group = group_of(context.plan, "all", stage)
                holder = _ParameterHolder(parameters)
                self.replicated[stage], reduction = wrap(context, holder, None, group, stage=stage)
                self.reductions.append(reduction)

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        loss = super().forward_backward(accumulation_steps)
        require_reduced(self.context, self.model, self.reductions)
        return loss

    def before_last_backward(self, stage: int) -> None:
        """Call the stage's DDP forward, which makes DDP synchronize the next backward pass."""
        if stage in self.replicated:
            with torch.enable_grad():
                self.replicated[stage]()


class _ParameterHolder(nn.Module):
    """Holds a stage's parameters, so that DDP synchronizes them. It computes nothing itself."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.parameters_of_stage = nn.ParameterList(parameters)

    def forward(self) -> None:
        return None
