"""Precision: fp64 and fp32 are types of the whole model, tf32 a mode of the GPU, bf16 and fp16 autocast (fp16 with GradScaler).

FSDP casts whole modules instead (its MixedPrecisionPolicy), so that low precision is also what travels: no autocast there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from paralab.plan.plan import Plan
from paralab.workload.batch import map_tensors

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    def __init__(self, plan: Plan) -> None:
        self.name, self.device_type = plan.precision, plan.device
        self.by_module = plan.strategy == "fsdp"
        # The cache of cast weights belongs to the process: micro-batches in threads would share its nodes of the graph.
        self.cache_casts = plan.device == "cuda" or plan.micro_batches == 1
        torch.set_default_dtype(torch.float32)
        # fp32 means fp32: PyTorch's own default lets cuDNN use tf32 in convolutions.
        torch.backends.cuda.matmul.allow_tf32 = plan.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = plan.precision == "tf32"
        self.scaler = torch.amp.GradScaler(plan.device, init_scale=plan.loss_scale or 1.0, enabled=plan.scaler)

    def cast_model(self, model: nn.Module) -> nn.Module:
        if self.name != "fp64":
            return model
        torch.set_default_dtype(torch.float64)  # tensors that the model makes in its forward must fit its parameters
        return model.double()

    def cast_batch(self, batch: Any) -> Any:
        """Floating-point inputs follow the model; under autocast the operators cast for themselves."""
        if self.name != "fp64":
            return batch
        return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch)

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast is a state of the thread: enter it in every thread that runs the model."""
        if self.name not in LOW or self.by_module:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=LOW[self.name], cache_enabled=self.cache_casts)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def scale_like(self, loss: torch.Tensor) -> torch.Tensor | None:
        """The scaler's present scale, still on the device: `get_scale()` would make the host wait."""
        return self.scaler.scale(torch.ones_like(loss)) if self.scaler.is_enabled() else None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()
