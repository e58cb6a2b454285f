"""Write events about a rank's first gradients and its memory by kind."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from paralab.machine.host import peak_resident_bytes
from paralab.worker.groups import whole_model_groups
from paralab.worker.measure.memory import num_bytes
from paralab.worker.optimizer import own_optimizer
from paralab.worker.rank_context import RankContext, Strategy
from paralab.worker.sharding.shards import is_split, local


@torch.no_grad()
def note_gradients(context: RankContext, model: nn.Module) -> None:
    """Count zero (underflow) and non-finite (overflow) gradients in the first step, before the
    GradScaler unscales them.

    The CPU waits for the device, but only once, in a warm-up step."""
    plan, rank = context.plan, context.rank
    # All shards have the same gradients for parameters that are not split, so count those once.
    every = not (rank.replica if plan.expert_plan else rank.shard)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    gradients = [_values(local(grad)) for grad in grads if every or is_split(grad)]
    total = sum(gradient.numel() for gradient in gradients)
    zeros = sum(int((gradient == 0).sum()) for gradient in gradients)
    not_finite = sum(int((~gradient.isfinite()).sum()) for gradient in gradients)

    counts = torch.tensor([total, zeros, not_finite])
    if plan.shards_parameters or plan.tensor_plan or plan.expert_plan:  # each rank has shards
        for group in whole_model_groups(plan, rank.rank):
            dist.all_reduce(counts, group=group)

    scale = context.precision.scaler.get_scale() if plan.scaler else None
    fields = dict(zip(("total", "zeros", "not_finite"), counts.tolist(), strict=True))
    context.probe.emit("gradients", step=0, **fields, scale=scale)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the stored values. A sparse gradient does not store zeros."""
    return gradient if gradient.layout == torch.strided else gradient.coalesce().values()


def note_memory(context: RankContext, strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
    """Write one `memory` event for each device on this rank."""
    devices = {device.name: device for device in context.rank.devices}
    state = own_optimizer(optimizer).state
    for number, (name, device) in enumerate(devices.items()):
        parameters = strategy.device_parameters(name)
        parts = {
            "parameters": num_bytes(parameters),
            "gradients": num_bytes([parameter.grad for parameter in parameters]),
            "optimizer": num_bytes([[state.get(p, {}) for p in parameters], strategy.own_state()]),
            "activations": context.meter.peak.get(name),
        }
        if context.plan.strategy == "dp" and number:
            parts["optimizer"] = 0  # the optimizer updates only the first replica
        parts |= strategy.transient_bytes()

        if context.plan.device == "cuda":
            how, total = "allocator", torch.cuda.max_memory_allocated(device.torch)
        else:
            how, total = "counted", sum(value or 0 for value in parts.values())
        fields = {"bytes": total, "how": how, **parts, "process_bytes": peak_resident_bytes()}
        context.probe.emit("memory", device=name, **fields)
