"""`hybrid`: data parallelism over processes, each of them a pipeline over its own devices.

Every stage has a DistributedDataParallel of its own, in a process group of its own: stages finish
at different times, and a collective must meet its counterpart on the other ranks, not another
stage's. DDP sees only the last micro-batch's backward pass (until then gradients just add up), so
synchronization happens once per optimizer step and overlaps with the earlier stages' work.
"""

from __future__ import annotations

import torch
from torch import nn

from paralab.worker.groups import group_of
from paralab.worker.rank_context import Pass, RankContext
from paralab.worker.strategies.ddp import require_reduced, wrap
from paralab.worker.strategies.pipeline_threads import Staged


class Hybrid:
    def __init__(self, job: RankContext, model: nn.Module) -> None:
        self.staged = Staged(job, model, before_last_backward=self._arm)
        self.model = model
        self.synchronized = []
        for stage in range(job.plan.stages):
            held = _Held(self.staged.stage_parameters(stage))
            needed = any(parameter.requires_grad for parameter in held.parameters())
            self.synchronized.append(
                wrap(job, held, None, group_of(job.plan, stage), stage=stage) if needed else None
            )

    def forward_backward(self, passes: list[Pass]) -> torch.Tensor:
        loss = self.staged.forward_backward(passes)
        require_reduced(
            self.staged.job,
            self.model,
            [reduction for _, reduction in filter(None, self.synchronized)],
        )
        return loss

    def _arm(self, stage: int) -> None:
        """Tell the stage's DDP that the next backward pass is the one to synchronize: that is what
        its forward is for."""
        if synchronized := self.synchronized[stage]:
            with torch.enable_grad():
                synchronized[0]()


class _Held(nn.Module):
    """The parameters of a stage, for DDP to synchronize; the computation happens in the user's
    model."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)

    def forward(self) -> None:
        return None
