"""`pipeline` and `hybrid` with --schedule: a process per stage, in the order of
torch.distributed.pipelining's schedules.

Micro-batches must have one shape there, so they are filled up with copies of their last sample to
the width of the widest one of a full batch; the loss sees only the real ones. Gradients add up over
micro-batches and passes; at the end of an optimizer step they are summed over the replicas of the
same stage, in buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.utils.checkpoint import CheckpointError

from paralab.errors import UsageError
from paralab.plan.batches import widest
from paralab.plan.schedules import UNCUT, WITHOUT
from paralab.worker.groups import group_of, mesh, pipeline_group
from paralab.worker.rank_context import Micro, Pass, RankContext
from paralab.worker.stage_module import Part, keep_only, shapes_of
from paralab.workload.batch import filled, map_tensors, num_samples

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
BUCKET_MB = 25.0  # DDP's default
KEPT = 4  # schedules of different shapes that are kept, with their buffers


class Scheduled:
    def __init__(self, job: RankContext, model: nn.Module) -> None:
        plan, rank = job.plan, job.rank
        assert rank.stage is not None
        self.job, self.model = job, model
        owned = range(rank.stage, len(plan.stage_parts), plan.stages)
        keep_only(model, plan.stage_parts, set(owned))
        device = torch.device(rank.devices[0].torch)
        # gloo sends from host memory alone.
        wire = device if "nccl" in (plan.backend or "") else torch.device("cpu")
        self.parts = [
            Part(model, number, plan.stage_parts, device, wire, self._finish) for number in owned
        ]
        for part in self.parts:
            part.on_entry, part.autocast = self._arrived, job.precision.autocast
            part.halves = plan.schedule == "zero-bubble"
        self.device, self.wire, self.mesh = device, wire, mesh(plan, rank.replica, rank.stage)
        job.meter.know_only(self.stage_parameters(0))
        self.width = widest(rank.samples_per_step, plan.accumulate, plan.micro_batches)
        self.schedules: dict[Any, tuple[Any, list[_Stage]]] = {}
        self.micros: list[Micro] = []
        self.losses: list[torch.Tensor] = []
        if plan.scaler:
            job.precision.agreed_over = group_of(plan)

    def stage_parameters(self, stage: int) -> list[nn.Parameter]:
        """All parameters of this rank: it has one device."""
        return [parameter for part in self.parts for parameter in part.held]

    def forward_backward(self, passes: list[Pass]) -> torch.Tensor:
        self.losses.clear()
        number_of_micros = self.job.plan.micro_batches
        for number, micros in enumerate(passes):
            self.micros = micros
            inputs = [filled(micro.inputs, self.width) for micro in micros]
            inputs += [inputs[-1]] * (
                number_of_micros - len(inputs)
            )  # a small last batch: whole copies, which weigh nothing
            schedule, stages = self._schedule_for(inputs[0])
            for part, stage in zip(self.parts, stages, strict=True):
                part.inputs, stage.accumulation = inputs, number
            with _checkpoints_explained():
                schedule.step(target=torch.arange(number_of_micros), return_outputs=False)
            self.job.meter.backward_done()
        self._sum_over_replicas()
        return (
            torch.stack(self.losses).sum() if self.losses else torch.zeros((), device=self.device)
        )

    def _schedule_for(self, inputs: Any) -> tuple[Any, list[_Stage]]:
        """The schedule for inputs of these shapes: its buffers have the shapes of what is sent."""
        key = shapes_of(inputs)
        for part in self.parts:
            part.expect(key)
        if key not in self.schedules:
            plan = self.job.plan
            while len(self.schedules) >= KEPT:
                oldest = next(iter(self.schedules))
                del self.schedules[oldest]
                for part in self.parts:
                    part.forget(oldest)
            group = self.mesh.get_group("stage")
            stages = [
                _Stage(self.job, part, len(plan.stage_parts), self.wire, group)
                for part in self.parts
            ]
            kind, arguments = (
                SCHEDULES[plan.schedule or ""],
                {"loss_fn": _already_the_loss, "scale_grads": False},
            )
            made = kind(stages if plan.chunks > 1 else stages[0], plan.micro_batches, **arguments)
            self.schedules[key] = made, stages
        return self.schedules[key]

    def _finish(self, output: Any, chunk: int, live: bool) -> torch.Tensor:
        """The last part's end: the loss of the micro-batch's real samples."""
        job = self.job
        if chunk < len(self.micros):
            micro = self.micros[chunk]
            real = num_samples(micro.inputs)
            output = output if real == self.width else _first(output, real, self.width)
        else:
            micro = Micro(None, None, 0.0)
        loss = job.weighted_loss(output, micro)
        if live:
            self.losses.append(loss.detach())
        return job.precision.scaler.scale(loss).to(self.wire)

    def _arrived(self, first: torch.Tensor) -> None:
        self.job.show_split(self.job.rank.devices[0].name, first.device, first.shape)

    @torch.no_grad()
    def _sum_over_replicas(self) -> None:
        """Sum the gradients over the replicas of this stage, in flat buckets."""
        plan, probe = self.job.plan, self.job.probe
        if plan.rank_replicas < 2:
            return
        group = self.mesh.get_group("replica")
        device = self.job.rank.devices[0].name
        for number, parameters in enumerate(
            buckets(self.stage_parameters(0), (plan.bucket_mb or BUCKET_MB) * 2**20)
        ):
            # Another replica may have a gradient where this one has none, and all must send the
            # same. Behind the gradients goes who has one: what no replica has stays without, or
            # weight decay would move a parameter that nobody uses.
            has = [parameter.grad is not None for parameter in parameters]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            flat = torch.cat(
                [*(gradient.flatten() for gradient in gradients), gradients[0].new_tensor(has)]
            )
            start = probe.clock.mark(device)
            dist.all_reduce(flat, group=group)
            probe.all_reduces += 1
            probe.bytes += flat.nbytes
            if probe.detailed:
                where = {"bucket": number, "bytes": flat.nbytes, "stage": self.job.rank.stage}
                probe.note("all_reduce", start, probe.clock.mark(device), **where)
            *summed, anywhere = flat.split([*(g.numel() for g in gradients), len(gradients)])
            for parameter, gradient, total, used in zip(
                parameters, gradients, summed, anywhere.tolist(), strict=True
            ):
                parameter.grad = gradient.copy_(total.view_as(gradient)) if used else None


class _Stage(PipelineStage):
    """A stage that notes what it does."""

    def __init__(
        self,
        job: RankContext,
        part: Part,
        parts: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(part, part.number, parts, device, group=group)
        self.job, self.part, self.accumulation = job, part, 0
        self.name = job.rank.devices[0].name

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        part, probe = self.part, self.job.probe
        start = probe.clock.mark(self.name)
        part.chunk, part.live = fwd_chunk_id, True
        try:
            with self.job.meter.counting(self.name, piece=(part.number, fwd_chunk_id)):
                output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # torch wraps what was raised inside the model
        finally:
            part.chunk, part.live = 0, False
        self._note("forward", start, fwd_chunk_id)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        start = self.job.probe.clock.mark(self.name)
        with self.part.returning(bwd_chunk_id, last=full_backward):
            super().backward_one_chunk(
                bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
            )
        if full_backward:
            self.job.meter.backward_done((self.part.number, bwd_chunk_id))
        if (
            full_backward or not self.is_first
        ):  # torch leaves all of the first part's work to its weight pass
            self._note("backward", start, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        start = self.job.probe.clock.mark(self.name)
        with self.part.returning(bwd_chunk_id, last=True):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        self.job.meter.backward_done((self.part.number, bwd_chunk_id))
        self._note("backward", start, bwd_chunk_id, weights=True)

    def _note(self, event: str, start: Any, micro: int, **more: Any) -> None:
        probe = self.job.probe
        if probe.detailed:
            where = {
                "device": self.name,
                "stage": self.part.number,
                "micro": micro,
                "accumulation": self.accumulation,
            }
            probe.note(event, start, probe.clock.mark(self.name), **where, **more)


@contextmanager
def _checkpoints_explained() -> Iterator[None]:
    """A cut inside a checkpointed block: the block is computed again from its start, which may lie
    before the part."""
    try:
        yield
    except Exception as error:
        causes: list[BaseException | None] = [error, error.__cause__]
        if not any(isinstance(cause, CheckpointError) for cause in causes):
            raise
        raise UsageError(
            "A part of the model begins inside a checkpointed block (torch.utils.checkpoint): the block's first half, which "
            "is in another process, would have to be computed again here.",
            fix=f"split_points of the workload that are whole blocks: {UNCUT}",
        ) from error


def _already_the_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The last part returns its loss."""
    return output


def _first(output: Any, real: int, width: int) -> Any:
    """The real samples of an output whose micro-batch was filled up."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim and tensor.shape[0] == width:
            return tensor[:real]
        raise UsageError(
            f"A micro-batch of {real} samples was filled up to {width}, and the model's output has a tensor of shape "
            f"{tuple(tensor.shape)}, from which the {width - real} copies cannot be cut off.",
            fix=f"a --batch-size that all micro-batches share equally, or {WITHOUT}",
        )

    return map_tensors(cut, output)


def buckets(parameters: list[nn.Parameter], limit_bytes: float) -> list[list[nn.Parameter]]:
    """Trainable parameters in groups of one type, each of at most so many bytes (or of one
    parameter that is larger)."""
    found: list[list[nn.Parameter]] = []
    room, dtype = 0.0, None
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.nbytes > room or parameter.dtype != dtype:
            found.append([])
            room, dtype = limit_bytes, parameter.dtype
        found[-1].append(parameter)
        room -= parameter.nbytes
    return found


def whole_state(job: RankContext, model: nn.Module) -> dict[str, Any] | None:
    """The state_dict of the whole model on rank 0, gathered from the stages of the first replica;
    None on other ranks."""
    if job.rank.replica:
        return None
    held = {name: value.cpu() for name, value in model.state_dict().items() if not value.is_meta}
    gathered: list[Any] = [None] * job.plan.stages
    dist.gather_object(
        held, gathered if job.rank.rank == 0 else None, 0, pipeline_group(job.plan, 0)
    )
    if job.rank.rank:
        return None
    together = {name: value for part in gathered for name, value in part.items()}
    return {name: together[name] for name in model.state_dict()}
