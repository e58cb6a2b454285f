"""`ddp`: one process per replica and the real DistributedDataParallel, whose all-reduces are timed by a communication hook.

The losses are already weighted by their share of the global batch (`Job.weighted_loss`), so gradients are *summed* over ranks, not
averaged: an average of means would give every rank the same say, however many samples or tokens it holds.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook at run time.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paralab.worker.job import Job, Pass
from paralab.worker.passes import accumulate
from paralab.worker.probes import Probe


class Ddp:
    def __init__(self, job: Job, model: nn.Module) -> None:
        self.job = job
        self.model = model.to(job.rank.devices[0].torch)
        self.ddp = wrap(job, self.model, device=job.rank.devices[0].torch)

    def forward_backward(self, passes: list[Pass]) -> torch.Tensor:
        return accumulate(self.job, self.ddp, passes, unsynchronised=self.ddp.no_sync)


def wrap(
    job: Job, module: nn.Module, device: str | None, group: dist.ProcessGroup | None = None, **where: int
) -> DistributedDataParallel:
    """DDP with the plan's bucket size and the timed all-reduce. `where` is added to every event (e.g. stage=1)."""
    ddp = DistributedDataParallel(
        module,
        device_ids=[torch.device(device).index] if device and device != "cpu" else None,
        process_group=group,
        bucket_cap_mb=job.plan.bucket_mb,
        find_unused_parameters=job.plan.find_unused,
    )
    ddp.register_comm_hook((job.probe, group, where), timed_all_reduce)
    return ddp


def timed_all_reduce(
    state: tuple[Probe, dist.ProcessGroup | None, dict[str, int]],
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket over the ranks, and note when it was ready, when it was done, and its size."""
    probe, group, where = state
    buffer = bucket.buffer()
    device = str(buffer.device) if buffer.is_cuda else None
    start = probe.clock.mark(device)
    probe.all_reduces += 1
    probe.bytes += buffer.nbytes
    fields = {"bucket": bucket.index(), "bytes": buffer.nbytes, **where}
    work = dist.all_reduce(buffer, group=group, async_op=True)
    on_stream = buffer.is_cuda and "nccl" in dist.get_backend(group)

    def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        # NCCL completes on the stream, gloo (which copies through the host) on the host.
        if probe.detailed:
            probe.note("all_reduce", start, probe.clock.mark(device) if on_stream else probe.clock.now(), **fields)
        return future.value()[0]

    finished: torch.futures.Future[torch.Tensor] = work.get_future().then(done)
    return finished
