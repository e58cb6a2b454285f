"""`mp` and `pipeline`: one model on multiple devices in one process, without changing the user's
forward().

A stage begins when the model calls a certain submodule. A hook on that submodule moves the tensors
to the stage's device, through an autograd node (`_Crossing`) that also runs in the backward pass.
With one micro-batch, this is model parallelism: one device works at a time. With several
micro-batches, it is a pipeline (GPipe: all forward passes, then all backward passes):

    on CPUs   each micro-batch runs in its own thread and waits for its turn (`StageOrder`)
    on GPUs   one thread is enough, because each device runs queued kernels
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from paralab.worker.measure.clock import Mark
from paralab.worker.rank_context import AccumulationStep, MicroBatch, RankContext, Strategy
from paralab.workload.batch import call_model, map_tensors, tensors


class PipelineThreads(Strategy):
    def __init__(self, context: RankContext, model: nn.Module) -> None:
        self.context, self.model = context, model
        self.names = [device.name for device in context.rank.devices]
        self.devices = [torch.device(device.torch) for device in context.rank.devices]
        self.current = threading.local()  # `.passage` is the micro-batch that this thread runs
        self._place()

        # Use threads only on virtual CPU devices. If stages shared a device, their threads would
        # only wait for each other.
        plan = context.plan
        self.threads: ThreadPoolExecutor | None = None
        if plan.device == "cpu" and len(set(self.names)) > 1 and plan.micro_batches > 1:
            self.threads = ThreadPoolExecutor(plan.micro_batches, "paralab-micro")

    def _place(self) -> None:
        """Move each stage to its device, and add hooks to the modules where stages begin."""
        modules = dict(self.model.named_modules())
        for stage, part in enumerate(self.context.plan.stage_parts):
            for name in part.modules:
                module, device = modules[name], self.devices[stage]
                for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                    tensor.data = tensor.data.to(device)
                if len(set(self.devices)) > 1:
                    # Tensors outside the main path (a mask, for example) must move too.
                    hook = partial(_move_arguments, device)
                    module.register_forward_pre_hook(hook, with_kwargs=True)
            if stage:
                modules[part.start].register_forward_pre_hook(
                    partial(self._cross_to, stage), with_kwargs=True, prepend=True
                )

    def _cross_to(self, stage: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Move the arguments of a stage's first module to the stage's device."""
        passage: Passage | None = getattr(self.current, "passage", None)
        device = self.devices[stage]
        # The micro-batch does not advance if activation checkpointing calls the module again during
        # backward, or if the forward pass calls it twice or out of order.
        if passage is None or passage.returning or stage <= passage.stage:
            return move((args, kwargs), device)

        crossing = [t for t in tensors((args, kwargs)) if t.requires_grad]
        came_from = passage.stage
        passage.forward_to(stage)
        cross: Any = _Crossing.apply
        arrived = iter(cross(passage, came_from, device, *crossing) if crossing else ())
        inputs = map_tensors(
            lambda t: next(arrived) if t.requires_grad else move(t, device), (args, kwargs)
        )
        self.context.note_split(self.names[stage], inputs)
        return inputs

    def before_last_backward(self, stage: int) -> None:
        """Called before a stage's last backward pass in a step. Subclasses may override this."""

    def stage_parameters(self, stage: int) -> list[nn.Parameter]:
        modules = dict(self.model.named_modules())
        names = self.context.plan.stage_parts[stage].modules
        return [p for name in names for p in modules[name].parameters(recurse=False)]

    def device_parameters(self, device: str) -> list[nn.Parameter]:
        stages = [stage for stage, name in enumerate(self.names) if name == device]
        return [parameter for stage in stages for parameter in self.stage_parameters(stage)]

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        losses = []
        for number, micros in enumerate(accumulation_steps):
            passages = [Passage(self, micro, j, number) for j, micro in enumerate(micros)]
            passages[-1].last = number == len(accumulation_steps) - 1
            self._sweep(passages, Passage.forward)
            self._sweep(passages, Passage.backward)
            self.context.meter.backward_done()
            losses += [passage.finish() for passage in passages]
        # Move the loss to the first device, which also records the step's marks. So the loss has
        # arrived once the device passes the marks.
        return torch.stack(losses).sum().to(self.devices[0])

    def _sweep(self, passages: list[Passage], run: Callable[[Passage], None]) -> None:
        """Run all micro-batches forward or backward, in threads that take turns, or one by one
        without threads."""
        if self.threads is None:
            for passage in passages:
                run(passage)
            return

        order = StageOrder(len(self.devices))

        def take_turns(passage: Passage) -> None:
            passage.order = order
            try:
                run(passage)
            except BaseException:
                order.abort()
                raise

        futures = [self.threads.submit(take_turns, passage) for passage in passages]
        errors = [error for future in futures if (error := future.exception())]
        if errors:  # raise the cause, not the error of a thread that stopped waiting
            raise min(errors, key=lambda error: isinstance(error, Aborted))


def move(tree: Any, device: torch.device, copy: bool = False) -> Any:
    """Move the tensors. Wait only for copies to the CPU, which reads them right away."""
    to_gpu = device.type == "cuda"
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=to_gpu, copy=copy), tree)


def _move_arguments(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return move((args, kwargs), device)


class Passage:
    """One micro-batch's path through the stages, forward and backward."""

    def __init__(
        self, pipeline: PipelineThreads, micro: MicroBatch, number: int, accumulation: int
    ) -> None:
        self.pipeline, self.context, self.micro = pipeline, pipeline.context, micro
        self.number, self.accumulation = number, accumulation
        self.last = False  # whether this is the step's last micro-batch
        self.order: StageOrder | None = None
        self.returning = False
        self.loss: torch.Tensor
        self._counting: AbstractContextManager[None] = nullcontext()

    def forward(self) -> None:
        context, pipeline = self.context, self.pipeline
        last_stage = len(pipeline.devices) - 1
        pipeline.current.passage = self
        with context.precision.autocast(), context.drawing(lambda: self.stage):
            self._enter(0)
            inputs = move(self.micro.inputs, pipeline.devices[0])
            context.note_split(pipeline.names[0], inputs)
            output = call_model(pipeline.model, inputs)

            if self.stage < last_stage:
                # The forward pass skipped stages where other micro-batches wait for their turn.
                self.forward_to(last_stage)
                output = move(output, pipeline.devices[-1])
            targets = move(self.micro.targets, pipeline.devices[-1])
            self.loss = context.weighted_loss(output, MicroBatch(None, targets, self.micro.share))
        self._leave()

    def forward_to(self, stage: int) -> None:
        """Pass through all stages up to this one. Micro-batches take turns at each stage."""
        while self.stage < stage:
            self._leave()
            self._enter(self.stage + 1)

    def backward(self) -> None:
        self.pipeline.current.passage, self.returning = self, True
        self._enter(len(self.pipeline.devices) - 1)
        with self.context.drawing(lambda: self.stage):
            self.context.precision.backward(self.loss)
        self.backward_to(0)  # no gradient reaches the first stages if they are frozen
        self._leave()

    def backward_to(self, stage: int) -> None:
        while self.stage > stage:
            self._leave()
            self._enter(self.stage - 1)

    def finish(self) -> torch.Tensor:
        """Return the loss without its graph, and drop the graph, which refers to this passage and
        would form a reference cycle."""
        loss = self.loss.detach()
        del self.loss, self.micro
        return loss

    def _enter(self, stage: int) -> None:
        self.stage = stage
        if self.order:
            self.order.enter(stage, self.number)
        if self.context.probe.detailed:
            self.start: Mark = self.context.probe.clock.mark(self.pipeline.names[stage])
        if not self.returning:
            self._counting = self.context.meter.counting(self.pipeline.names[stage])
            self._counting.__enter__()
        elif self.last:
            self.pipeline.before_last_backward(stage)

    def _leave(self) -> None:
        probe, device = self.context.probe, self.pipeline.names[self.stage]
        if not self.returning:
            self._counting.__exit__(None, None, None)
        if probe.detailed:
            probe.note(
                "backward" if self.returning else "forward",
                self.start,
                probe.clock.mark(device),
                device=device,
                stage=self.stage,
                micro=self.number,
                accumulation=self.accumulation,
            )
        if self.order:
            self.order.leave(self.stage, self.number)


class _Crossing(torch.autograd.Function):
    """Moves tensors from one stage to the next, and gradients in the other direction."""

    @staticmethod
    def forward(
        ctx: Any, passage: Passage, stage: int, device: torch.device, *values: torch.Tensor
    ) -> Any:
        """Move values from `stage` to `device`."""
        ctx.passage, ctx.stage, ctx.came_from = passage, stage, [value.device for value in values]
        # Always copy. An input that is returned unchanged would not get a graph node, and the model
        # could not change a view in place.
        return tuple(move(value, device, copy=True) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.passage.backward_to(ctx.stage)
        moved = (move(grad, device) for grad, device in zip(grads, ctx.came_from, strict=True))
        return None, None, None, *moved


class Aborted(Exception):
    """Another micro-batch failed, so this one stops waiting."""


class StageOrder:
    """The order of micro-batches at each stage, for one forward or backward sweep. Micro-batch j
    enters a stage when j-1 has left it.

        forward, 2 stages, 3 micro-batches            backward
            stage 0   0 1 2                               stage 1   0 1 2
            stage 1     0 1 2                             stage 0     0 1 2
    """

    def __init__(self, stages: int) -> None:
        self._next = [0] * stages
        self._changed = threading.Condition()
        self._aborted = False

    def enter(self, stage: int, micro: int) -> None:
        """Wait until all earlier micro-batches have left this stage."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or self._next[stage] == micro)
            if self._aborted:
                raise Aborted

    def leave(self, stage: int, micro: int) -> None:
        with self._changed:
            self._next[stage] = micro + 1
            self._changed.notify_all()

    def abort(self) -> None:
        """Wake all waiting micro-batches after a failure."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
