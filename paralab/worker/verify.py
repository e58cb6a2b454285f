"""Parallel against serial: what a training left behind, saved as a reference and compared with it.

Kept: the gradients of the first step, the parameters before and after, the buffers after, this
rank's part of every loss. The comparison is per parameter, in the units that the tolerance is
stated in (see `paralab.analyse.verify`).
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

from paralab.worker.shards import whole


@dataclass
class Trace:
    """What one training left behind, on the CPU."""

    start: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    end: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    @classmethod
    def begin(cls, model: nn.Module) -> Trace:
        return cls(_copy(_held(model)))

    def first_gradients(self, model: nn.Module, scale: float) -> None:
        grads = {name: p.grad for name, p in _held(model).items() if p.grad is not None}
        self.gradients = {name: grad / scale for name, grad in _copy(grads).items()}

    def finish(self, model: nn.Module, losses: list[float]) -> None:
        self.end, self.buffers, self.losses = _copy(_held(model)), _copy(_buffers(model)), losses

    def save(self, path: Path) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> Trace:
        return cls(**torch.load(path, weights_only=True))


def compare(mine: Trace, reference: Trace) -> dict[str, Any]:
    """The numbers of the comparison, as an event. A rank that holds a part of the model compares
    that part."""
    updates = {
        name: float((end - reference.start[name]).norm()) for name, end in reference.end.items()
    }
    # A sum that cancels almost to nothing (a LayerNorm's weight, say) keeps the rounding errors of
    # its terms: a tensor's difference is measured against its own update, or against the typical
    # update of a tensor where that is larger.
    typical = math.sqrt(statistics.mean(update**2 for update in updates.values()))
    absolute, relative, worst = 0.0, 0.0, ""
    for name, end in mine.end.items():
        difference = end - reference.end[name]
        ratio = float(difference.norm()) / (max(updates[name], typical) or 1.0)
        if not worst or not ratio <= relative:
            worst = name
        absolute, relative = (
            max(absolute, _largest(difference), key=_nan_last),
            max(relative, ratio, key=_nan_last),
        )
    factor, residual = _proportional(mine.gradients, reference.gradients)
    return {
        "parameter_error": _plain(absolute),
        "parameter_error_of_update": _plain(relative),
        "worst_parameter": worst,
        "gradient_error": _plain(_largest_difference(mine.gradients, reference.gradients)),
        "gradient_size": _plain(
            max((_largest(g) for g in reference.gradients.values()), default=0.0)
        ),
        "missing_gradients": sorted(
            (reference.gradients.keys() & mine.end.keys()) - mine.gradients.keys()
        ),
        "extra_gradients": sorted(mine.gradients.keys() - reference.gradients.keys()),
        "buffer_errors": _buffer_errors(mine.buffers, reference.buffers),
        "gradient_factor": _plain(factor),
        "gradient_residual": _plain(residual),
        "losses": [_plain(loss) for loss in mine.losses],
        "reference_losses": [_plain(loss) for loss in reference.losses],
        "digest": digest(mine.end),
        "compared": len(mine.end),
        "of": len(reference.end),
    }


def digest(parameters: dict[str, torch.Tensor]) -> str:
    """The same on two ranks only if every parameter is bit for bit the same."""
    sha = hashlib.sha256()
    for name in sorted(parameters):
        values = parameters[name].contiguous()
        sha.update(
            ctypes.string_at(values.data_ptr(), values.nbytes)
        )  # no numpy: torch does not need it either
    return sha.hexdigest()[:16]


def _proportional(
    mine: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """The factor c that best explains mine = c · reference, and how much of mine it leaves
    unexplained."""
    names = [name for name in reference if name in mine]
    if not names:
        return 1.0, 0.0
    a = torch.cat([mine[name].flatten().double() for name in names])
    b = torch.cat([reference[name].flatten().double() for name in names])
    factor = float(a @ b / (b @ b)) if float(b @ b) else 1.0
    size = float(a.norm())
    return factor, float((a - factor * b).norm()) / size if size else 0.0


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state_dict has, as far as this rank holds them."""
    return {
        f"{name}.{key}" if name else key: buffer
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
        and not buffer.is_meta
        and key not in module._non_persistent_buffers_set
    }


def _buffer_errors(
    mine: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> dict[str, float | str]:
    """The largest difference of every buffer that is not the same, relative to what is large in
    it."""
    found: dict[str, float | str] = {}
    for name, value in mine.items():
        other = reference.get(name)
        if other is None or other.shape != value.shape:
            found[name] = str(math.inf)
        elif not torch.equal(value, other):
            found[name] = _plain(
                _largest(value.double() - other.double()) / max(1.0, _largest(other.double()))
            )
    return found


def _held(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that this rank holds."""
    return {
        name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta
    }


def _copy(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: _dense(whole(tensor)).detach().cpu().clone() for name, tensor in tensors.items()}


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _largest_difference(mine: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    return max(
        (_largest(mine[name] - value) for name, value in reference.items() if name in mine),
        default=0.0,
        key=_nan_last,
    )


def _nan_last(value: float) -> float:
    """Sorts NaN above everything, so that a maximum does not lose it."""
    return math.inf if math.isnan(value) else value


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _plain(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if value - value == 0.0 else str(value)
