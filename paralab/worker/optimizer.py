"""Make a workload's optimizer and scheduler. (Not in loop.py, because an inspection must not import
the strategies.)"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paralab.errors import UsageError
from paralab.workload.workload import Workload


def make_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer for this rank's parameters. Those of other stages are on meta."""
    parameters = [parameter for parameter in model.parameters() if not parameter.is_meta]
    # A stage may have no parameters, but no optimizer accepts an empty list.
    parameters = parameters or [nn.Parameter(torch.empty(0))]
    if workload.optimizer is None:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    optimizer: Any = workload.optimizer(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = type(optimizer).__name__
        if isinstance(optimizer, list | tuple):
            what = f"a {what} of {len(optimizer)}"
        raise UsageError(
            f"optimizer(parameters) of {workload.name} returned {what}; paralab steps one "
            "torch.optim.Optimizer.",
            fix="one optimizer with several parameter groups: "
            "SGD([{'params': a, 'lr': 0.1}, {'params': b, 'lr': 0.01}])",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS calls the model several times per step, which no strategy supports.",
            fix="another optimizer",
        )
    return optimizer


def make_scheduler(workload: Workload, optimizer: torch.optim.Optimizer) -> Any:
    """Make the learning-rate scheduler, if there is one. paralab calls `step()` without arguments
    after each optimizer step."""
    scheduler = workload.scheduler(optimizer) if workload.scheduler else None
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            f"The scheduler of {workload.name} is ReduceLROnPlateau, whose step needs a metric; "
            "paralab calls step() without one.",
            fix="a scheduler that depends only on the step: CosineAnnealingLR, OneCycleLR, "
            "LambdaLR, …",
        )
    return scheduler
