"""`ddp`: one process per replica with the real DistributedDataParallel. A communication hook times
the all-reduces.

Losses are already weighted by their share of the global batch (`weighted_loss`), so
gradients are *summed* over ranks, not averaged. Averaging the ranks' means would give each rank the
same weight, no matter how many samples or tokens it has.
"""

# No `from __future__ import annotations` here: DDP checks a communication hook's annotations at run
# time.
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paralab.errors import ParalabError
from paralab.worker.groups import group_of
from paralab.worker.measure.probes import Probe
from paralab.worker.rank_context import AccumulationStep, RankContext, Strategy

if TYPE_CHECKING:
    from paralab.worker.compression import Compression


class Ddp(Strategy):
    def __init__(self, context: RankContext, model: nn.Module) -> None:
        device = context.rank.devices[0]
        self.context, self.model = context, model.to(device.torch)
        group = group_of(context.plan)
        self.ddp, self.reduction = wrap(context, self.model, device.torch, group)
        context.note_split.watch(self.model, device.name)

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        if self.context.plan.sync_every_pass:
            loss = self._synchronize_always(accumulation_steps)
        else:
            loss = self.accumulate(self.ddp, accumulation_steps, self.ddp.no_sync)
        if self.reduction.compression:
            self.reduction.compression.require_finite(self.context.probe.step)
        require_reduced(self.context, self.model, [self.reduction])
        return loss

    def own_state(self) -> dict[str, Any]:
        compression = self.reduction.compression
        return compression.own_state() if compression else {}

    def restore_own(self, state: dict[str, Any]) -> None:
        if self.reduction.compression:
            self.reduction.compression.restore_own(state)

    def _synchronize_always(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        """Synchronize in each accumulation step. Each step reduces the accumulated gradient,
        including the part that is already reduced. Summing would multiply that part by the number
        of ranks, but averaging does not change it. So multiply the losses by the number of ranks,
        and average the gradients."""
        ranks = self.context.plan.world_size
        steps = accumulation_steps
        scaled = [[replace(each, share=each.share * ranks) for each in step] for step in steps]
        return self.accumulate(self.ddp, scaled) / ranks


@dataclass
class Reduction:
    """One DDP module's all-reduces, and the parameters that were reduced in this step.

    DDP waits for the gradients of all parameters in a bucket. If a gradient is missing, DDP never
    reduces the bucket, and torch raises an error only in the next forward pass, after the optimizer
    has stepped with gradients that differ between ranks.
    """

    probe: Probe
    group: dist.ProcessGroup
    divisor: int
    where: dict[str, int]
    compression: "Compression | None" = None
    reduced: set[int] = field(default_factory=set)  # ids of parameters


def require_reduced(context: RankContext, model: nn.Module, reductions: list[Reduction]) -> None:
    """Raise if a gradient was not reduced in this step. Call this after all backward passes."""
    reduced = {key for reduction in reductions for key in reduction.reduced}
    for reduction in reductions:
        reduction.reduced.clear()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    left = {name: p for name, p in trained.items() if id(p) not in reduced}
    if not left:
        return

    unused = [name for name, parameter in left.items() if parameter.grad is None] or list(left)
    names = ", ".join(unused[:4]) + (", …" if len(unused) > 4 else "")
    strategy, step = context.plan.strategy, context.probe.step
    if strategy == "ddp":
        where, fix = "step", "--find-unused, which allows ranks to use different parameters"
    elif strategy == "fsdp":
        where, fix = "step", "--zero 2, or ddp --find-unused"
    else:
        where = "the last micro-batch of step"
        fix = "use every parameter in every micro-batch, or ddp --find-unused"
    raise ParalabError(
        f"{strategy}: on this rank, {where} {step} did not use {names}, and DDP waits for the "
        "gradient of every parameter.",
        fix=fix,
    )


def wrap(
    context: RankContext,
    module: nn.Module,
    device: str | None,
    group: dist.ProcessGroup,
    **where: int,
) -> tuple[DistributedDataParallel, Reduction]:
    """Wrap the module in DDP with a timed all-reduce, whose events have the fields in `where`."""
    plan = context.plan
    ddp = DistributedDataParallel(
        module,
        device_ids=[torch.device(device).index] if device and device != "cpu" else None,
        process_group=group,
        bucket_cap_mb=plan.bucket_mb,
        find_unused_parameters=plan.find_unused,
        gradient_as_bucket_view=plan.bucket_view,
        static_graph=plan.static_graph,
    )
    divisor = plan.world_size if plan.sync_every_pass else 1
    compression = None
    if plan.compress:
        from paralab.worker.compression import make_compression  # importing it is slow

        compression = make_compression(plan, group, module)
    reduction = Reduction(context.probe, group, divisor, where, compression)
    ddp.register_comm_hook(reduction, timed_all_reduce)
    return ddp, reduction


def timed_all_reduce(
    state: Reduction,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket over the ranks. Record its size and the times when it was ready and reduced."""
    state.reduced.update(map(id, bucket.parameters()))
    buffer = bucket.buffer()
    if state.divisor > 1:
        buffer /= state.divisor

    where = {"bucket": bucket.index(), **state.where}
    if state.compression:
        begin = partial(state.probe.begin_collective, group=state.group, **where)
        return state.compression.reduce(bucket, begin)
    note = state.probe.begin_collective("all_reduce", buffer, state.group, **where)
    work = dist.all_reduce(buffer, group=state.group, async_op=True)

    def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        note()
        return future.value()[0]

    finished: torch.futures.Future[torch.Tensor] = work.get_future().then(done)
    return finished
