"""`ddp`: one process per replica and the real DistributedDataParallel, whose all-reduces are timed by a communication hook.

The losses are already weighted by their share of the global batch (`Job.weighted_loss`), so gradients are *summed* over ranks, not
averaged: an average of means would give every rank the same say, however many samples or tokens it holds.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook at run time.
import itertools
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paralab.errors import ParalabError
from paralab.worker.groups import group_of
from paralab.worker.job import Job, Pass
from paralab.worker.memory import stored_bytes
from paralab.worker.passes import accumulate
from paralab.worker.probes import Probe


class Ddp:
    def __init__(self, job: Job, model: nn.Module) -> None:
        self.job = job
        self.model = model.to(job.rank.devices[0].torch)
        self.ddp = wrap(job, self.model, device=job.rank.devices[0].torch, group=group_of(job.plan))

    def forward_backward(self, passes: list[Pass]) -> torch.Tensor:
        try:
            return self._forward_backward(passes)
        except RuntimeError as error:
            if "did not receive grad for rank" not in str(error):
                raise
            raise self._unused(str(error)) from error

    def _unused(self, message: str) -> ParalabError:
        """Name the parameters and our option; torch's message has their numbers and an argument of DDP's constructor."""
        numbers = message.partition("did not receive grad for rank")[2].partition(":")[2].split()
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        unused = [names[int(number)] for number in itertools.takewhile(str.isdigit, numbers) if int(number) < len(names)]
        return ParalabError(
            f"ddp: in step {self.job.probe.step - 1} this rank did not use {', '.join(unused[:4]) or 'some parameters'}, "
            "and DDP waits for the gradient of every parameter.",
            cure="--find-unused, which allows ranks to use different parameters",
        )

    def _forward_backward(self, passes: list[Pass]) -> torch.Tensor:
        if not self.job.plan.sync_every_pass:
            return accumulate(self.job, self.ddp, passes, unsynchronised=self.ddp.no_sync)
        # Every pass reduces what all passes have added up so far, also what was reduced before. A mean leaves that as it is, a sum
        # would count it once per rank: so the parts are made larger by the number of ranks, and averaged.
        ranks = self.job.plan.world_size
        larger = [[replace(micro, share=micro.share * ranks) for micro in micros] for micros in passes]
        return accumulate(self.job, self.ddp, larger) / ranks


def wrap(job: Job, module: nn.Module, device: str | None, group: dist.ProcessGroup, **where: int) -> DistributedDataParallel:
    """DDP with the plan's bucket size and the timed all-reduce. `where` is added to every event (e.g. stage=1)."""
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
    ddp.register_comm_hook((job.probe, group, divisor, where), timed_all_reduce)
    return ddp


def timed_all_reduce(
    state: tuple[Probe, dist.ProcessGroup, int, dict[str, int]],
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket over the ranks, and note when it was ready, when it was done, and its size."""
    probe, group, divisor, where = state
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
            probe.note("all_reduce", start, probe.clock.mark(device) if on_stream else probe.clock.now(), **fields)
        return future.value()[0]

    finished: torch.futures.Future[torch.Tensor] = work.get_future().then(done)
    return finished
