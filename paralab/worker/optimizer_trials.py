"""Find out what a plan needs to know about an optimizer: run a few steps on small matrices."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn

from paralab.worker.optimizer import make_optimizer
from paralab.workload.batch import tensors
from paralab.workload.workload import Workload


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
    """Return whether an element's update depends on the rest of its parameter (Adafactor, Muon). If
    so, two halves of a matrix are updated differently from the full matrix."""

    def compare(start: torch.Tensor, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        [whole] = _train(workload, [start], [slope])
        return whole, torch.cat(_train(workload, list(start.chunk(2)), list(slope.chunk(2))))

    return _steps_differ(compare)


def mixes_parameters(workload: Workload) -> bool:
    """Return whether a parameter's update depends on other parameters (a clipped global norm)."""

    def compare(start: torch.Tensor, slope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        [alone] = _train(workload, [start], [slope])
        return alone, _train(workload, [start, start], [slope, 10.0 * slope])[0]

    return _steps_differ(compare)


def _steps_differ(compare: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Compare small, medium, and large gradients. Return False if the optimizer cannot step."""
    torch.manual_seed(0)
    start, slope = torch.randn(8, 8), torch.randn(8, 8)
    try:
        for scale in (1e-3, 1.0, 1e3):
            one, other = compare(start, slope * scale)
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-7):
                return True
    except Exception:
        return False
    return False


def _train(
    workload: Workload, starts: list[torch.Tensor], slopes: list[torch.Tensor]
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
def _step(optimizer: torch.optim.Optimizer) -> None:
    inspect.unwrap(type(optimizer).step)(optimizer)  # the wrapper would import torch.compile
