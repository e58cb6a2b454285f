"""The optimiser of a workload. (Apart from the loop: a process that only looks at the workload need not load the strategies.)"""

from __future__ import annotations

import torch
from torch import nn

from paralab.workload.workload import Workload


def make_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """For the parameters that this rank holds; those of other stages are on the meta device."""
    held = [parameter for parameter in model.parameters() if not parameter.is_meta]
    held = held or [nn.Parameter(torch.empty(0))]  # a stage of activations alone: no optimiser takes an empty list
    return workload.optimizer(held) if workload.optimizer else torch.optim.SGD(held, lr=0.01, momentum=0.9)
