"""Backward passes one after the other: what one device does, and every strategy that wraps the
whole model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paralab.worker.rank_context import Pass, RankContext
from paralab.workload.batch import call_model


def accumulate(
    job: RankContext,
    model: Callable[..., Any],
    passes: list[Pass],
    unsynchronized: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> torch.Tensor:
    """Forward and backward for every pass, adding gradients; all but the last one in
    `unsynchronized()`."""
    device = job.rank.devices[0].name
    losses = []
    for number, [micro] in enumerate(passes):
        with nullcontext() if number == len(passes) - 1 else unsynchronized():
            with job.probe.span("forward", device=device, accumulation=number):
                with job.precision.autocast(), job.meter.counting(device):
                    output = call_model(model, micro.inputs)
                    loss = job.weighted_loss(output, micro)
            with job.probe.span("backward", device=device, accumulation=number):
                job.precision.backward(loss)
        job.meter.backward_done()
        losses.append(loss.detach())
    return torch.stack(losses).sum()
