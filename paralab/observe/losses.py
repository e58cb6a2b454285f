"""Loss functions that average: their results, their target shapes, and how many targets count."""

import math
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from paralab.observe.digests import is_sampled
from paralab.observe.rank import Fields, Rank
from paralab.observe.wrappers import argument, is_inside, wrap

AVERAGING = (
    *("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
)
MOST_COUNTED = 1_000_000  # count CPU targets in every step only up to this many


def install(rank: Rank) -> None:
    for name in AVERAGING:
        describe, conclude = partial(_describe, rank, name), partial(_conclude, rank)
        wrap(rank, functional, name, "loss", describe, conclude)


def _conclude(rank: Rank, result: Any, /, *args: Any, **kwargs: Any) -> Fields:
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        return {}
    if not (rank.watched if result.device.type == "cpu" else is_sampled(rank.steps + 1)):
        return {}
    value = float(result.detach())
    return {"value": value} if math.isfinite(value) else {}


def _describe(rank: Rank, name: str, /, *args: Any, **kwargs: Any) -> Fields | None:
    given, target = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "target")
    if not isinstance(given, torch.Tensor) or not isinstance(target, torch.Tensor):
        return None
    if is_inside(rank, "loss"):
        return None
    fields: Fields = {
        "reduction": kwargs.get("reduction", "mean"),
        "target_shape": list(target.shape),
        "grad": torch.is_grad_enabled(),
    }
    if name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
        ignored = argument(args, kwargs, 4, "ignore_index", -100)
        cheap = target.device.type == "cpu" and target.numel() <= MOST_COUNTED
        if rank.watched if cheap else is_sampled(rank.steps + 1):
            fields["valid"] = int((target != ignored).sum())
    return fields
