"""Save a run's results as a reference, or compare them with a saved reference.

A trace contains the first step's gradients, the parameters before and after the run, the buffers
after the run, and this rank's part of each loss. This module compares parameters one by one, and
`paralab.analyse.judge` compares the differences with the tolerance.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paralab.errors import UsageError
from paralab.plan.batches import GlobalBatch
from paralab.units import plural
from paralab.worker.rank_context import RankContext
from paralab.worker.samples import rank_batches
from paralab.worker.sharding.shards import whole
from paralab.workload.batch import map_tree, unpack

Tensors = dict[str, torch.Tensor]


@dataclass
class TrainingTrace:
    """One run's results, on the CPU."""

    start: Tensors
    gradients: Tensors = field(default_factory=dict)
    end: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    learns: bool = False  # whether any step has a nonzero gradient

    @classmethod
    def begin(cls, model: nn.Module) -> TrainingTrace:
        return cls(_copy(_parameters(model)))

    def first_gradients(self, grads: dict[str, torch.Tensor | None], scale: float) -> None:
        self.gradients = {name: grad / scale for name, grad in _copy(grads).items()}

    def note_gradients(self, grads: dict[str, torch.Tensor | None]) -> None:
        self.learns = self.learns or any(map(_largest, _copy(grads).values()))

    def finish(self, model: nn.Module, losses: list[float]) -> None:
        # Do not use model.state_dict(), which the user may have overridden to leave out buffers.
        buffers = {
            f"{name}.{key}" if name else key: buffer
            for name, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if key not in module._non_persistent_buffers_set
        }
        self.end, self.buffers, self.losses = _copy(_parameters(model)), _copy(buffers), losses

    def require_gradients(self) -> None:
        """Raise if all gradients of a reference are zero, because any sum of zeros is correct."""
        if not self.learns:
            raise UsageError(
                "On a single device, all gradients are zero in "
                f"{plural(len(self.losses), 'step')}, so a comparison would prove nothing.",
                fix="initial weights, data, or a --seed with nonzero gradients",
            )

    def save(self, path: Path) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> TrainingTrace:
        return cls(**torch.load(path, weights_only=True))


def load_example(context: RankContext) -> Any:
    """Load the inputs of three samples, if verification needs them to find the layout of random
    tensors. Return None if it does not, or if the data has fewer samples."""
    if "random" not in context.plan.control:
        return None
    plan, workload = context.plan, context.workload
    if plan.samples is not None and plan.samples < 3:
        return None
    three = [GlobalBatch(step=0, epoch=0, first=0, size=3)]
    _, samples = next(rank_batches(workload, three, samples=plan.samples, seed=plan.seed))
    inputs, _ = (workload.unpack or unpack)(context.precision.cast_batch(samples))
    return inputs


def compare(mine: TrainingTrace, reference: TrainingTrace) -> dict[str, Any]:
    """Compute the fields of the `verify` event. Each rank compares its own part of the model."""
    absolute, relative, worst = _compare_parameters(mine, reference)
    factor, residual = _fit_factor(mine.gradients, reference.gradients)
    gradients = {name: g for name, g in reference.gradients.items() if name in mine.gradients}
    differences = [_largest(mine.gradients[name] - g) for name, g in gradients.items()]
    expected = reference.gradients.keys() & mine.end.keys()
    fields = {
        "parameter_error": absolute,
        "parameter_error_of_update": relative,
        "worst_parameter": worst,
        "gradient_error": max(differences, default=0.0, key=_nan_last),
        "gradient_size": max(map(_largest, reference.gradients.values()), default=0.0),
        "missing_gradients": sorted(expected - mine.gradients.keys()),
        "extra_gradients": sorted(mine.gradients.keys() - reference.gradients.keys()),
        "buffer_errors": _buffer_errors(mine.buffers, reference.buffers),
        "gradient_factor": factor,
        "gradient_residual": residual,
        "losses": mine.losses,
        "reference_losses": reference.losses,
        "digest": digest(mine.end),
        "compared": len(mine.end),
        "of": len(reference.end),
    }
    # JSON has no NaN and no infinity, so write them as strings.
    json_ready: dict[str, Any] = map_tree(
        lambda number: number if math.isfinite(number) else str(number),
        fields,
        is_leaf=lambda item: isinstance(item, float),
    )
    return json_ready


def _compare_parameters(mine: TrainingTrace, reference: TrainingTrace) -> tuple[float, float, str]:
    """Return the largest absolute and relative differences, and the parameter with the largest
    relative difference."""
    start = reference.start
    updates = {name: float((end - start[name]).norm()) for name, end in reference.end.items()}
    # If a sum nearly cancels (such as the gradient of a LayerNorm weight), the result is mostly
    # rounding errors. So divide by the parameter's update or by the typical update, whichever is
    # larger.
    typical = math.sqrt(statistics.mean(update**2 for update in updates.values()))

    absolute, relative, worst = 0.0, 0.0, ""
    for name, end in mine.end.items():
        difference = end - reference.end[name]
        ratio = float(difference.norm()) / (max(updates[name], typical) or 1.0)
        if not worst or not ratio <= relative:
            worst = name
        absolute = max(absolute, _largest(difference), key=_nan_last)
        relative = max(relative, ratio, key=_nan_last)
    return absolute, relative, worst


def digest(parameters: Tensors) -> str:
    """Hash the parameters. Two ranks get equal digests only if all parameters match bit for bit."""
    sha = hashlib.sha256()
    for name in sorted(parameters):
        values = parameters[name].contiguous()
        # Do not use values.numpy(), because torch does not require numpy.
        sha.update(ctypes.string_at(values.data_ptr(), values.nbytes))
    return sha.hexdigest()[:16]


def _fit_factor(mine: Tensors, reference: Tensors) -> tuple[float, float]:
    """Fit mine = c · reference. Return c, and the size of the residual relative to `mine`."""
    names = [name for name in reference if name in mine]
    if not names:
        return 1.0, 0.0
    a = torch.cat([_real(mine[name]).flatten() for name in names])
    b = torch.cat([_real(reference[name]).flatten() for name in names])
    factor = float(a @ b / (b @ b)) if float(b @ b) else 1.0
    size = float(a.norm())
    return factor, float((a - factor * b).norm()) / size if size else 0.0


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return this rank's parameters. Those on the meta device belong to other ranks' stages."""
    return {name: p for name, p in model.named_parameters() if not p.is_meta}


def _buffer_errors(mine: Tensors, reference: Tensors) -> dict[str, float]:
    """Return each differing buffer's largest difference, relative to its largest value."""
    errors: dict[str, float] = {}
    for name, value in mine.items():
        other = reference.get(name)
        if other is None or other.shape != value.shape:
            errors[name] = math.inf
        elif not torch.equal(value, other):
            difference = _largest(_real(value) - _real(other))
            errors[name] = difference / max(1.0, _largest(_real(other)))
    return errors


def _copy(values: dict[str, Any]) -> Tensors:
    """Copy this rank's tensors to the CPU. A gradient may be sparse or missing."""
    tensors = {n: t for n, t in values.items() if isinstance(t, torch.Tensor) and not t.is_meta}
    return {name: whole(t).to_dense().detach().cpu().clone() for name, t in tensors.items()}


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real and imaginary parts in fp64."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _nan_last(value: float) -> float:
    """Sort NaN above all numbers, so that `max` propagates it."""
    return math.inf if math.isnan(value) else value


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
