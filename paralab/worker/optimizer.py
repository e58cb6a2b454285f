"""Create a workload's optimizer and scheduler, and determine their properties for a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paralab.errors import UsageError
from paralab.workload.batch import tensors
from paralab.workload.workload import Workload


def make_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """Create an optimizer for this rank's parameters. Other stages' parameters are on the meta
    device."""
    parameters = [parameter for parameter in model.parameters() if not parameter.is_meta]
    if not any(parameter.requires_grad for parameter in parameters):
        # This stage trains nothing, but no optimizer accepts an empty list.
        parameters.append(nn.Parameter(torch.empty(0)))
    if workload.optimizer is None:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    optimizer: Any = workload.optimizer(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = type(optimizer).__name__
        if isinstance(optimizer, list | tuple):
            what = f"a {what} of {len(optimizer)}"
        raise UsageError(
            f"optimizer(parameters) of {workload.name} returned {what}, but paralab needs a single "
            "torch.optim.Optimizer.",
            fix="one optimizer with multiple parameter groups: "
            "SGD([{'params': a, 'lr': 0.1}, {'params': b, 'lr': 0.01}])",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS calls the model several times per step, which no strategy supports.",
            fix="another optimizer",
        )
    return optimizer


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that holds this rank's state (`ShardedOptimizer` wraps it)."""
    own: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return own


def make_scheduler(workload: Workload, optimizer: torch.optim.Optimizer) -> Any:
    """Create the learning-rate scheduler. paralab calls `step()` after each optimizer step."""
    scheduler = workload.scheduler(optimizer) if workload.scheduler else None
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            f"The scheduler of {workload.name} is ReduceLROnPlateau, whose step() needs a metric. "
            "paralab calls step() without a metric.",
            fix="a scheduler that depends only on the step, such as CosineAnnealingLR, OneCycleLR, "
            "or LambdaLR",
        )
    return scheduler


def state_bytes_per_byte(workload: Workload) -> float | None:
    """Measure the optimizer state in bytes per parameter byte: 0 for SGD, 1 with momentum, 2 for
    Adam. Return None if the optimizer cannot step on a plain matrix."""
    matrix = nn.Linear(64, 64, bias=False)
    matrix.weight.grad = torch.ones_like(matrix.weight)
    try:
        optimizer = make_optimizer(workload, matrix)
        _step(optimizer)
    except Exception:
        return None
    state = [t for values in optimizer.state.values() for t in tensors(values) if t.ndim]
    return sum(tensor.nbytes for tensor in state) / matrix.weight.nbytes


def mixes_rows(workload: Workload) -> bool:
    """Return whether an element's update depends on the rest of its parameter (Adafactor, Muon), so
    that splitting a matrix changes its update."""
    return _trains_differently(
        workload, lambda p, grad: torch.cat(_train(workload, p.chunk(2), grad.chunk(2)))
    )


def mixes_parameters(workload: Workload) -> bool:
    """Return whether a parameter's update depends on other parameters (a clipped global norm)."""
    return _trains_differently(
        workload, lambda p, grad: _train(workload, [p, p], [grad, 10.0 * grad])[0]
    )


def chooses_by_position(workload: Workload, model: nn.Module) -> bool:
    """Return whether the optimizer treats parameters differently if it gets only half of them (such
    as a lower learning rate for the first three)."""
    parameters = list(model.parameters())
    half = len(parameters) // 2
    whole = _settings(workload, parameters)
    for part in (parameters[:half], parameters[half:]):
        with suppress(Exception):  # for example, it may reject an empty group
            own = _settings(workload, part)
            if any(own.get(id(each)) != whole.get(id(each)) for each in part):
                return True
    return False


def _settings(workload: Workload, parameters: list[nn.Parameter]) -> dict[int, str]:
    """Return each parameter's settings, such as its learning rate."""
    optimizer = make_optimizer(workload, nn.ParameterList(parameters))
    return {
        id(parameter): repr({name: group[name] for name in group if name != "params"})
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _trains_differently(
    workload: Workload, train: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> bool:
    """Return whether `train` gives a different result from training the full matrix, for small,
    medium, or large gradients. Return False if the optimizer step fails."""
    torch.manual_seed(0)
    start, slope = torch.randn(8, 8), torch.randn(8, 8)
    try:
        for scale in (1e-3, 1.0, 1e3):
            [alone] = _train(workload, [start], [slope * scale])
            if not torch.allclose(alone, train(start, slope * scale), rtol=1e-4, atol=1e-7):
                return True
    except Exception:
        return False
    return False


def _train(
    workload: Workload, starts: Sequence[torch.Tensor], slopes: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run two steps with constant gradients."""
    parameters = nn.ParameterList([nn.Parameter(start.clone()) for start in starts])
    optimizer = make_optimizer(workload, parameters)
    for _ in range(2):
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.grad = slope.clone()
        _step(optimizer)
    return [parameter.detach() for parameter in parameters]


@torch.no_grad()
def _step(optimizer: Any) -> None:
    """Run a step and its hooks. Do not call torch's wrapper, which would import torch.compile."""
    for before in optimizer._optimizer_step_pre_hooks.values():
        before(optimizer, (), {})
    inspect.unwrap(type(optimizer).step)(optimizer)
    for after in optimizer._optimizer_step_post_hooks.values():
        after(optimizer, (), {})
