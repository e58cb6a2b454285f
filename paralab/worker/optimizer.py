"""The optimizer and scheduler of a workload. (Apart from the loop: looking at a workload need not
load the strategies.)"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paralab.errors import UsageError
from paralab.workload.workload import Workload


def make_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """For the parameters that this rank holds; those of other stages are on the meta device."""
    held = [parameter for parameter in model.parameters() if not parameter.is_meta]
    held = held or [
        nn.Parameter(torch.empty(0))
    ]  # a stage of activations alone: no optimizer takes an empty list
    if workload.optimizer is None:
        return torch.optim.SGD(held, lr=0.01, momentum=0.9)
    optimizer: Any = workload.optimizer(held)
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = (
            f"a {type(optimizer).__name__} of {len(optimizer)}"
            if isinstance(optimizer, list | tuple)
            else type(optimizer).__name__
        )
        raise UsageError(
            f"optimizer(parameters) of {workload.name} returned {what}; paralab steps one torch.optim.Optimizer.",
            fix="one optimizer with several parameter groups: SGD([{'params': a, 'lr': 0.1}, {'params': b, 'lr': 0.01}])",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS calls the model several times per step, which no strategy can spread.",
            fix="another optimizer",
        )
    return optimizer


def make_scheduler(workload: Workload, optimizer: torch.optim.Optimizer) -> Any:
    """The learning-rate scheduler, or None. It is stepped after every optimizer step, without
    arguments."""
    scheduler = workload.scheduler(optimizer) if workload.scheduler else None
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            f"The scheduler of {workload.name} is ReduceLROnPlateau, whose step needs a metric; paralab calls step() without one.",
            fix="a scheduler that depends only on the step: CosineAnnealingLR, OneCycleLR, LambdaLR, …",
        )
    return scheduler
