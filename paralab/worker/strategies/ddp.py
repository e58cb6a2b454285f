"""`ddp`: one process per replica and the real DistributedDataParallel, whose all-reduces are timed
by a communication hook.

The losses are already weighted by their share of the global batch (`RankContext.weighted_loss`), so
gradients are *summed* over ranks, not averaged: an average of means would give every rank the same
say, however many samples or tokens it holds.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook
# at run time.
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paralab.errors import ParalabError
from paralab.worker.accumulation import accumulate
from paralab.worker.groups import group_of
from paralab.worker.memory import stored_bytes
from paralab.worker.probes import Probe
from paralab.worker.rank_context import Pass, RankContext


class Ddp:
    def __init__(self, job: RankContext, model: nn.Module) -> None:
        self.job = job
        self.model = model.to(job.rank.devices[0].torch)
        self.ddp, self.reduction = wrap(
            job, self.model, job.rank.devices[0].torch, group_of(job.plan)
        )

    def forward_backward(self, passes: list[Pass]) -> torch.Tensor:
        loss = self._forward_backward(passes)
        require_reduced(self.job, self.model, [self.reduction])
        return loss

    def _forward_backward(self, passes: list[Pass]) -> torch.Tensor:
        if not self.job.plan.sync_every_pass:
            return accumulate(self.job, self.ddp, passes, unsynchronized=self.ddp.no_sync)
        # Every pass reduces what all passes have added up so far, also what was reduced before. A
        # mean leaves that as it is, a sum would count it once per rank: so the parts are made
        # larger by the number of ranks, and averaged.
        ranks = self.job.plan.world_size
        larger = [
            [replace(micro, share=micro.share * ranks) for micro in micros] for micros in passes
        ]
        return accumulate(self.job, self.ddp, larger) / ranks


@dataclass
class Reduction:
    """The all-reduces of one DDP, and the parameters whose gradients they have summed in this step.

    DDP waits for the gradient of every parameter of a bucket. If one gets none, the bucket is never
    reduced, and torch complains only in the next forward: the optimizer has then already stepped
    with gradients that differ from rank to rank.
    """

    probe: Probe
    group: dist.ProcessGroup
    divisor: int
    where: dict[str, int]
    reduced: set[int] = field(default_factory=set)  # ids of parameters


def require_reduced(job: RankContext, model: nn.Module, reductions: list[Reduction]) -> None:
    """The backward passes of this step are done; raise if a gradient was not reduced."""
    reduced = {key for reduction in reductions for key in reduction.reduced}
    for reduction in reductions:
        reduction.reduced.clear()
    left = {
        name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in reduced
    }
    if not left:
        return
    unused = [name for name, parameter in left.items() if parameter.grad is None] or list(left)
    names = ", ".join(unused[:4]) + (", …" if len(unused) > 4 else "")
    where = "step" if job.plan.strategy == "ddp" else "last micro-batch of step"
    raise ParalabError(
        f"{job.plan.strategy}: the {where} {job.probe.step} of this rank did not use {names}, and DDP waits for the gradient of "
        "every parameter.",
        fix="--find-unused, which allows ranks to use different parameters"
        if job.plan.strategy == "ddp"
        else "use every parameter in every micro-batch, or ddp --find-unused",
    )


def wrap(
    job: RankContext, module: nn.Module, device: str | None, group: dist.ProcessGroup, **where: int
) -> tuple[DistributedDataParallel, Reduction]:
    """DDP with the plan's bucket size and the timed all-reduce. `where` is added to every event
    (e.g. stage=1)."""
    ddp = DistributedDataParallel(
        module,
        device_ids=[torch.device(device).index] if device and device != "cpu" else None,
        process_group=group,
        bucket_cap_mb=job.plan.bucket_mb,
        find_unused_parameters=job.plan.find_unused,
        gradient_as_bucket_view=job.plan.bucket_view,
        static_graph=job.plan.static_graph,
    )
    divisor = job.plan.world_size if job.plan.sync_every_pass else 1
    reduction = Reduction(job.probe, group, divisor, where)
    ddp.register_comm_hook(reduction, timed_all_reduce)
    return ddp, reduction


def timed_all_reduce(
    state: Reduction,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket over the ranks, and note when it was ready, when it was done, and its size."""
    probe, group, divisor, where = state.probe, state.group, state.divisor, state.where
    state.reduced.update(map(id, bucket.parameters()))
    buffer = bucket.buffer()
    if divisor > 1:
        buffer /= divisor
    device = str(buffer.device) if buffer.is_cuda else None
    start = probe.clock.mark(device)
    probe.all_reduces += 1
    sent = stored_bytes(buffer)
    probe.bytes += sent
    fields = {"bucket": bucket.index(), "bytes": sent, **where}
    work = dist.all_reduce(buffer, group=group, async_op=True)
    on_stream = buffer.is_cuda and "nccl" in dist.get_backend(group)

    def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        # NCCL completes on the stream, gloo (which copies through the host) on the host.
        if probe.detailed:
            probe.note(
                "all_reduce",
                start,
                probe.clock.mark(device) if on_stream else probe.clock.now(),
                **fields,
            )
        return future.value()[0]

    finished: torch.futures.Future[torch.Tensor] = work.get_future().then(done)
    return finished
