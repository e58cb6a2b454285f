"""`pipeline` and `hybrid` with --schedule: one process per stage, using the schedules in
torch.distributed.pipelining.

These schedules need micro-batches with equal shapes. So we pad each micro-batch with copies of its
last sample, up to the largest micro-batch size in a full batch. The loss uses only the real
samples. Gradients accumulate over micro-batches and accumulation steps. Before the optimizer step,
they are summed over all replicas of the stage, in buckets.

With --shards, each stage has a process per shard, and the stage's layers are split over these
processes. Each shard has its own pipeline, because all shards have the same activations between
stages. With --zero 2 and --zero 3, FSDP shards each part of the model over the replicas
(`ShardedStage`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointError

from paralab.errors import ParalabError, UsageError
from paralab.plan.batches import widest
from paralab.plan.schedules import UNCUT, WITHOUT
from paralab.plan.stage_groups import part_of
from paralab.worker.groups import broadcast_model, group_along, group_of, order_group
from paralab.worker.measure.memory import addresses
from paralab.worker.precision import LOW
from paralab.worker.rank_context import (
    AccumulationStep,
    MicroBatch,
    RankContext,
    Strategy,
    with_idle_steps,
)
from paralab.worker.replica_sum import sum_over_replicas
from paralab.worker.sharding.collective_order import CollectiveOrder
from paralab.worker.sharding.sharded_layers import mixing_tensors
from paralab.worker.sharding.sharded_units import (
    explain_dtypes,
    gathered_bytes,
    replica_mesh,
    stepping_on_shards,
)
from paralab.worker.sharding.shards import local, whole
from paralab.worker.sharding.split_layers import (
    align_shards,
    require_agreement,
    running_shards,
    split_layers,
)
from paralab.worker.stages.sharded_stage import ShardedStage, any_rank
from paralab.worker.stages.stage_module import StageModule, free_other_stages
from paralab.worker.stages.stage_shapes import shapes_of
from paralab.workload.batch import copied, map_tensors, num_samples, resize

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
MOST_SCHEDULES = 4  # cache this many schedules with their buffers, one per set of input shapes


class PipelineProcesses(Strategy):
    def __init__(self, context: RankContext, model: nn.Module) -> None:
        plan, rank = context.plan, context.rank
        assert rank.stage is not None
        self.context, self.model = context, model
        self.device = torch.device(rank.devices[0].torch)
        # gloo can send only from host memory.
        self.wire = torch.device("cpu") if plan.backend == "gloo" else self.device
        self.pipeline = group_along(plan, "stages", rank.rank)

        owned = range(rank.stage, len(plan.stage_parts), plan.stages)
        broadcast_model(model, group_of(plan))
        free_other_stages(model, plan.stage_parts, set(owned))
        self.sharded: dict[int, ShardedStage] = {}
        self._split(owned)
        places = self.device, self.wire, self._finish
        self.modules = [
            StageModule(model, each, plan.stage_parts, *places, self.sharded.get(each))
            for each in owned
        ]
        for module in self.modules:
            if self.sharded and plan.precision in LOW:
                module.cast = context.precision.cast_inputs
            module.on_entry = partial(context.note_split, rank.devices[0].name)
            module.autocast = context.precision.autocast
            module.splits_backward = plan.schedule == "zero-bubble"

        # The other stages' parameters are freed, so activations may reuse their addresses.
        context.meter.ignored = addresses(map(local, self.device_parameters()))
        self.width = widest(rank.samples_per_step, plan.accumulate, plan.micro_batches)
        self.schedules: dict[Any, tuple[Any, list[_TimedStage]]] = {}  # per input shape
        self.micros: list[MicroBatch] = []
        self.losses: list[torch.Tensor] = []
        if plan.scaler:
            context.precision.agreed_over = group_of(plan)

    def _split(self, owned: range) -> None:
        """Split the groups of layers in this rank's parts of the model over the shards, and shard
        the parts over the replicas."""
        context, plan, rank = self.context, self.context.plan, self.context.rank.rank
        mesh = replica_mesh(plan, rank) if plan.shards_parameters else None
        if plan.tensor_plan:
            shards = group_along(plan, "shards", rank)
            alone = DeviceMesh.from_group(shards, plan.device, mesh_dim_names=("shards",))
            groups = [g for g in plan.tensor_plan.kept if part_of(g, plan.stage_parts) in owned]
            split_layers(context, self.model, groups, mesh["shards"] if mesh else alone)
        if mesh:
            mesh = mesh["replicas"] if plan.tensor_plan else mesh
            self.order_group = order_group(plan, rank)
            self.order = CollectiveOrder(self.order_group, rank)
            self.sharded = {
                part: ShardedStage(context, self.model, part, mesh, self.order) for part in owned
            }

    def device_parameters(self, device: str = "") -> list[nn.Parameter]:
        """Return all parameters on this rank, which has one device."""
        return [parameter for module in self.modules for parameter in module.parameters()]

    def transient_bytes(self) -> dict[str, int]:
        """Count the bytes of the parameters that FSDP gathers, and of the gradients that it has not
        reduced. It reduces them after the last micro-batch."""
        plan = self.context.plan
        if plan.shards_per_parameter == 1:
            return {}
        sharded = [stage.sharded for stage in self.sharded.values()]
        unreduced = sum(unit.gradient_bytes for each in sharded for unit in each.units)
        return {"gathered": gathered_bytes(sharded, plan.zero), "unreduced": unreduced}

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        self.losses.clear()
        align_shards(self.context, self.model)
        plan = self.context.plan
        num_micros, steps = plan.micro_batches, accumulation_steps
        if self.sharded:
            steps = with_idle_steps(steps, plan.accumulate)
            self.order.begin(self.context.probe.step)
        for number, micros in enumerate(steps):
            self.micros = micros
            inputs = [resize(micro.inputs, self.width) for micro in micros]
            # A small last batch may have fewer micro-batches, so add copies with weight zero.
            inputs += [copied(inputs[-1]) for _ in range(num_micros - len(inputs))]

            schedule, stages = self._schedule_for(inputs[0])
            for module, stage in zip(self.modules, stages, strict=True):
                module.inputs, stage.accumulation = inputs, number
            with _explain_checkpointing(), explain_dtypes(plan), running_shards(self.context):
                schedule.step(target=torch.arange(num_micros), return_outputs=False)
            self.context.meter.backward_done()

        self._sum_gradients()
        none = torch.zeros((), device=self.device)
        if not self.losses:
            return none
        loss = torch.stack(self.losses).sum()
        require_agreement(self.context, loss)
        return none if self.context.rank.shard else loss

    def _sum_gradients(self) -> None:
        if not self.sharded:
            sum_over_replicas(self.context, self.device_parameters())
            return
        for stage in reversed(self.sharded.values()):
            stage.reduce()
        self.order.end()

    def stepping(self) -> AbstractContextManager[None]:
        if self.sharded:
            return stepping_on_shards(self.context.plan)
        return mixing_tensors() if self.context.plan.tensor_plan else nullcontext()

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Gather the model's state from the first replica's stages. Only rank 0 returns it."""
        context = self.context
        values = ((name, value) for name, value in self.model.state_dict().items())
        own = {name: whole(value).cpu() for name, value in values if not value.is_meta}
        if context.rank.replica or context.rank.shard:
            return None
        gathered: list[Any] = [None] * context.plan.stages
        first = context.rank.rank == 0
        dist.gather_object(own, gathered if first else None, 0, self.pipeline)
        if not first:
            return None
        together = {name: value for stage in gathered for name, value in stage.items()}
        return {name: together[name] for name in self.model.state_dict()}

    def _schedule_for(self, inputs: Any) -> tuple[Any, list[_TimedStage]]:
        """Return the schedule and stages for these input shapes, which determine buffer sizes."""
        key = shapes_of(inputs)
        for module in self.modules:
            module.expect(key)
        if self.sharded and any_rank(key not in self.schedules, self.order_group):
            # A new schedule runs a trial to learn the shapes. Ranks that know the schedule run no
            # trial, so gathering parameters in it would hang.
            for stage in self.sharded.values():
                stage.pin()
        if key not in self.schedules:
            while len(self.schedules) >= MOST_SCHEDULES:
                oldest = next(iter(self.schedules))
                del self.schedules[oldest]
                for module in self.modules:
                    module.forget(oldest)
            plan, places = self.context.plan, (self.wire, self.pipeline)
            stages = [_TimedStage(self.context, module, *places) for module in self.modules]
            schedule = SCHEDULES[plan.schedule or ""](
                stages if plan.chunks > 1 else stages[0],
                plan.micro_batches,
                loss_fn=lambda output, target: output,  # the last stage returns its loss
                scale_grads=False,
            )
            self.schedules[key] = schedule, stages
        return self.schedules[key]

    def _finish(self, output: Any, micro_number: int, live: bool) -> torch.Tensor:
        """Compute the loss over the micro-batch's real samples, at the end of the last stage."""
        if self.sharded and self.context.plan.precision in LOW:
            output = self.context.precision.cast_output(output)
        if micro_number < len(self.micros):
            micro = self.micros[micro_number]
            real = num_samples(micro.inputs)
            output = output if real == self.width else _cut_off_copies(output, real, self.width)
        else:
            micro = MicroBatch(None, None, 0.0)
        loss = self.context.weighted_loss(output, micro)
        if live:
            self.losses.append(loss.detach())
        return self.context.precision.scaler.scale(loss).to(self.wire)


class _TimedStage(PipelineStage):
    """A stage that records its forward and backward passes."""

    def __init__(
        self, context: RankContext, module: StageModule, device: torch.device, group: Any
    ) -> None:
        parts = len(context.plan.stage_parts)
        super().__init__(module, module.number, parts, device, group=group)
        self.context, self.module, self.accumulation = context, module, 0
        self.name = context.rank.devices[0].name

    def _span(self, event: str, micro: int, **more: Any) -> AbstractContextManager[None]:
        where = {"stage": self.module.number, "micro": micro, "accumulation": self.accumulation}
        return self.context.probe.span(event, self.name, **where, **more)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        module, meter = self.module, self.context.meter
        module.micro_number, module.live = fwd_chunk_id, True
        try:
            counting = meter.counting(self.name, piece=(module.number, fwd_chunk_id))
            with self._span("forward", fwd_chunk_id), counting:
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # torch wraps the model's exception
        finally:
            module.micro_number, module.live = 0, False

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        # In the first stage, torch runs the entire backward pass as the weight pass.
        noted = full_backward or not self.is_first
        span = self._span("backward", bwd_chunk_id) if noted else nullcontext()
        with span, self.module.returning(bwd_chunk_id, last=full_backward):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self.context.meter.backward_done((self.module.number, bwd_chunk_id))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        span = self._span("backward", bwd_chunk_id, weights=True)
        with span, self.module.returning(bwd_chunk_id, last=True), _explain_weight_pass():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        self.context.meter.backward_done((self.module.number, bwd_chunk_id))


@contextmanager
def _explain_weight_pass() -> Iterator[None]:
    """Explain a failure in torch's separate backward pass for weights. It visits some nodes twice
    if a tensor depends only on parameters (such as a norm of DeBERTa's relative positions)."""
    try:
        yield
    except (KeyError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "second time" not in str(error):
            raise
        raise UsageError(
            "zero-bubble runs the backward pass for weights separately, and torch cannot do that for "
            f"this model ({type(error).__name__}). A tensor that is computed only from parameters, "
            "and then used several times, causes this.",
            fix=f"--schedule interleaved, or {WITHOUT}",
        ) from error


@contextmanager
def _explain_checkpointing() -> Iterator[None]:
    """Explain a failure in activation checkpointing, which recomputes a block from its start. If
    the model is cut inside the block, the block starts in another process."""
    try:
        yield
    except Exception as error:
        if isinstance(error.__cause__, ParalabError):  # torch wraps errors of a backward pass
            raise error.__cause__ from None
        causes = [cause for cause in (error, error.__cause__) if cause]
        if not any(isinstance(cause, CheckpointError) or _mixes_stages(cause) for cause in causes):
            raise
        raise UsageError(
            "A stage begins inside a checkpointed block (torch.utils.checkpoint). The backward "
            "pass would have to recompute the start of the block, which is in another process.",
            fix=f"workload split_points that name entire blocks: {UNCUT}",
        ) from error


def _mixes_stages(error: BaseException) -> bool:
    """Return whether recomputation failed on a meta tensor, which belongs to another stage."""
    files = {frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)}
    return checkpoint.__file__ in files and "meta" in str(error)


def _cut_off_copies(output: Any, real: int, width: int) -> Any:
    """Remove the padding from a micro-batch's output, so that only real samples remain."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim and tensor.shape[0] == width:
            return tensor[:real]
        raise UsageError(
            f"A micro-batch of {real} samples was padded to {width}. The model's output has a "
            f"tensor of shape {tuple(tensor.shape)}, from which the {width - real} padding "
            "samples cannot be removed.",
            fix=f"a --batch-size that gives equal micro-batches, or {WITHOUT}",
        )

    return map_tensors(cut, output)
