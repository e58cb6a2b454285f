"""Record how a batch was split: write the input shape that the model gets on each device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from paralab.worker.probes import Probe
from paralab.workload.batch import tensors


class SplitNotes:
    """Writes one event per device in the first step, and another whenever the shape changes."""

    def __init__(self, devices: list[str], probe: Probe) -> None:
        self.probe = probe
        self.expected = Counter(devices)  # several replicas on one GPU write several events
        self.shapes: dict[str, list[list[int]]] = {}

    def __call__(self, device: str, physical: torch.device, shape: torch.Size) -> None:
        shapes = self.shapes.setdefault(device, [])
        if len(shapes) < self.expected[device] or list(shape) not in shapes:
            shapes.append(list(shape))
            self.probe.emit(
                "split",
                step=self.probe.step,
                device=device,
                physical=str(physical),
                shape=list(shape),
            )

    def watch(self, model: nn.Module, device: str) -> None:
        """Note the input shape whenever the model is called."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = next(tensors((args, kwargs)))
            self(device, x.device, x.shape)

        model.register_forward_pre_hook(hook, with_kwargs=True)
