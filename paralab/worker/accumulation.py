"""Run accumulation steps one after another, on one device or in strategies that wrap the entire
model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paralab.worker.rank_context import AccumulationStep, RankContext
from paralab.workload.batch import call_model


def accumulate(
    context: RankContext,
    model: Callable[..., Any],
    accumulation_steps: list[AccumulationStep],
    unsynchronized: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> torch.Tensor:
    """Run forward and backward for each accumulation step and add up the gradients. All steps but
    the last run inside `unsynchronized()`."""
    device = context.rank.devices[0].name
    losses = []
    for number, [micro] in enumerate(accumulation_steps):
        last = number == len(accumulation_steps) - 1
        with nullcontext() if last else unsynchronized():
            with context.probe.span("forward", device=device, accumulation=number):
                with context.precision.autocast(), context.meter.counting(device):
                    output = call_model(model, micro.inputs)
                    loss = context.weighted_loss(output, micro)
            with context.probe.span("backward", device=device, accumulation=number):
                context.precision.backward(loss)
        context.meter.backward_done()
        losses.append(loss.detach())
    return torch.stack(losses).sum()
