"""Precision. fp64 and fp32 are dtypes of the entire model, tf32 is a GPU mode, and bf16 and fp16
use autocast (fp16 also uses a GradScaler).

FSDP does not use autocast. It casts entire modules instead (MixedPrecisionPolicy), so it also
communicates in low precision.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paralab.plan.plan import Plan
from paralab.workload.batch import map_tensors
from paralab.workload.fp64 import batch_in_fp64, model_in_fp64

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    def __init__(self, plan: Plan) -> None:
        self.name, self.device_type = plan.precision, plan.device
        self.by_module = plan.shards_parameters
        # All threads share autocast's cache of cast weights, so micro-batches in different threads
        # would share graph nodes.
        self.cache_casts = plan.device == "cuda" or plan.micro_batches == 1
        torch.set_default_dtype(torch.float32)
        # Do not use tf32 for fp32. By default, PyTorch lets cuDNN use tf32 in convolutions.
        torch.backends.cuda.matmul.allow_tf32 = plan.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = plan.precision == "tf32"
        scale = plan.loss_scale or 1.0
        self.scaler = torch.amp.GradScaler(plan.device, init_scale=scale, enabled=plan.scaler)
        # These ranks have different parameters but must skip the same steps.
        self.agreed_over: dist.ProcessGroup | None = None

    def cast_model(self, model: nn.Module) -> nn.Module:
        if self.name != "fp64":
            return model
        # Tensors that forward() creates must match the parameters.
        torch.set_default_dtype(torch.float64)
        return model_in_fp64(model)

    def cast_batch(self, batch: Any) -> Any:
        """Cast floating-point inputs to the model's dtype. Under autocast, operators cast them."""
        if self.name != "fp64":
            return batch
        return batch_in_fp64(batch)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context. Its state is per thread, so each thread must enter it."""
        if self.name not in LOW or self.by_module:
            return nullcontext()
        return torch.autocast(self.device_type, LOW[self.name], cache_enabled=self.cache_casts)

    def cast_inputs(self, tree: Any) -> Any:
        """Cast the inputs of a stage, as FSDP does for those of a whole model."""
        low = LOW[self.name]
        return map_tensors(lambda t: t.to(low) if t.is_floating_point() else t, tree)

    def cast_output(self, tree: Any) -> Any:
        """Cast the output of the last stage, because the loss is computed in fp32."""
        return map_tensors(lambda t: t.float() if t.is_floating_point() else t, tree)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()

    def scale_like(self, loss: torch.Tensor) -> torch.Tensor | None:
        """Return the scale as a device tensor. `get_scale()` would make the CPU wait."""
        return self.scaler.scale(torch.ones_like(loss)) if self.scaler.is_enabled() else None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.agreed_over:
            self._agree(optimizer, self.agreed_over)
        groups = optimizer.param_groups
        if not any(p.grad is not None for group in groups for p in group["params"]):
            optimizer.step()  # the scaler raises an error if there are no gradients
            return
        self.scaler.step(optimizer)
        self.scaler.update()

    def _agree(self, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
        """Skip the step on all ranks if a gradient is infinite on any rank."""
        self.scaler.unscale_(optimizer)
        state = self.scaler._per_optimizer_states[id(optimizer)]
        flags: dict[torch.device, torch.Tensor] = state["found_inf_per_device"]
        if not flags:  # this rank has no gradients
            device = optimizer.param_groups[0]["params"][0].device
            flags[device] = torch.zeros((), device=device)

        anywhere = torch.stack([flag.cpu() for flag in flags.values()]).max()
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
        for flag in flags.values():
            flag.fill_(anywhere.item())
