"""`mp` and `pipeline`: one model over several devices in one process, the user's forward unchanged.

A stage begins when a certain sub-module is called. A hook there carries the tensors to the stage's
device, through an autograd node (`_Crossing`) that also sees the backward pass come back. With one
micro-batch that is model parallelism: one device works at a time. With several it is a pipeline
(GPipe: all forward passes, then all backward passes):

    on CPUs   every micro-batch runs in its own thread and takes turns at the stages (`Turns`);
    on GPUs   one thread is enough: kernels are queued, and each device works through its own queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from paralab.worker.clock import Mark
from paralab.worker.rank_context import Micro, Pass, RankContext
from paralab.worker.stage_order import Aborted, Turns
from paralab.workload.batch import call_model, map_tensors, tensors


class Staged:
    """`before_last_backward(stage)` is called when the last micro-batch of a step begins a stage's
    backward pass."""

    def __init__(
        self,
        job: RankContext,
        model: nn.Module,
        before_last_backward: Callable[[int], None] = lambda stage: None,
    ) -> None:
        self.job, self.model = job, model
        self.names = [device.name for device in job.rank.devices]
        self.devices = [torch.device(device.torch) for device in job.rank.devices]
        self.before_last_backward = before_last_backward
        self.current = threading.local()  # .passage: the micro-batch that this thread runs
        self._place()
        # Threads only where devices are made of cores; stages on one device would take each other's
        # turn.
        concurrent = (
            job.plan.device == "cpu" and len(set(self.names)) > 1 and job.plan.micro_batches > 1
        )
        self.threads = (
            ThreadPoolExecutor(job.plan.micro_batches, thread_name_prefix="paralab-micro")
            if concurrent
            else None
        )

    def _place(self) -> None:
        """Move every stage's parameters to its device, and hook the places where a stage begins."""
        modules = dict(self.model.named_modules())
        parts = self.job.plan.stage_parts
        for stage, part in enumerate(parts):
            for name in part.modules:
                for tensor in [
                    *modules[name].parameters(recurse=False),
                    *modules[name].buffers(recurse=False),
                ]:
                    tensor.data = tensor.data.to(self.devices[stage])
                if (
                    len(set(self.devices)) > 1
                ):  # what reaches a module past the main path (a mask, say) must follow
                    modules[name].register_forward_pre_hook(
                        self._carry(self.devices[stage]), with_kwargs=True
                    )
            if stage:
                modules[part.start].register_forward_pre_hook(
                    self._cross(stage), with_kwargs=True, prepend=True
                )

    def _carry(self, device: torch.device) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return move((args, kwargs), device)

        return hook

    def _cross(self, stage: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            passage: Passage | None = getattr(self.current, "passage", None)
            device = self.devices[stage]
            if (
                passage is None or passage.returning
            ):  # activation checkpointing calls the module again, on the way back
                return move((args, kwargs), device)
            if stage <= passage.stage:  # called again, or out of order: it is no step forward
                return move((args, kwargs), device)
            crossing = [t for t in tensors((args, kwargs)) if t.requires_grad]
            came_from = passage.stage
            passage.forward_to(stage)
            first = next(tensors((args, kwargs)))
            self.job.show_split(self.names[stage], device, first.shape)
            moved = _Crossing.apply(passage, came_from, device, *crossing) if crossing else ()  # type: ignore[no-untyped-call]
            carried = iter(moved)
            return map_tensors(
                lambda t: next(carried) if t.requires_grad else move(t, device), (args, kwargs)
            )

        return hook

    def stage_parameters(self, stage: int) -> list[nn.Parameter]:
        modules = dict(self.model.named_modules())
        names = self.job.plan.stage_parts[stage].modules
        return [
            parameter for name in names for parameter in modules[name].parameters(recurse=False)
        ]

    def forward_backward(self, passes: list[Pass]) -> torch.Tensor:
        losses = []
        for number, micros in enumerate(passes):
            final = number == len(passes) - 1
            passages = [
                Passage(self, micro, j, number, final and j == len(micros) - 1)
                for j, micro in enumerate(micros)
            ]
            self._sweep([passage.forward for passage in passages], passages)
            self._sweep([passage.backward for passage in passages], passages)
            self.job.meter.backward_done()
            losses += [passage.finish() for passage in passages]
        # On the first device, like the marks of the step: what is read there is then known to be
        # there.
        return torch.stack(losses).sum().to(self.devices[0])

    def _sweep(self, calls: list[Callable[[], None]], passages: list[Passage]) -> None:
        """All micro-batches in one direction: in turn-taking threads on CPUs, one after the other
        otherwise."""
        if self.threads is None:
            for call in calls:
                call()
            return
        turns = Turns(len(self.devices))
        for passage in passages:
            passage.turns = turns

        def guarded(call: Callable[[], None]) -> None:
            try:
                call()
            except BaseException:
                turns.abort()
                raise

        futures = [self.threads.submit(guarded, call) for call in calls]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(
            errors, key=lambda error: isinstance(error, Aborted)
        ):  # the cause before its victims
            raise error


def move(tree: Any, device: torch.device, copy: bool = False) -> Any:
    """Every tensor of the tree on the device. The host waits only where it will read itself: on the
    way to a CPU."""
    return map_tensors(
        lambda tensor: tensor.to(device, non_blocking=device.type == "cuda", copy=copy), tree
    )


class Passage:
    """One micro-batch on its way through the stages, forward and back."""

    def __init__(
        self, staged: Staged, micro: Micro, number: int, accumulation: int, last: bool
    ) -> None:
        self.staged, self.micro, self.number, self.accumulation, self.last = (
            staged,
            micro,
            number,
            accumulation,
            last,
        )
        self.turns: Turns | None = None
        self.returning = False
        self.loss: torch.Tensor
        self._counting: AbstractContextManager[None] = nullcontext()

    def forward(self) -> None:
        job, staged = self.staged.job, self.staged
        staged.current.passage = self
        with job.precision.autocast(), job.drawing(lambda: self.stage):
            self._enter(0)
            self._count()
            inputs = move(self.micro.inputs, staged.devices[0])
            x = next(tensors(inputs))
            job.show_split(staged.names[0], x.device, x.shape)
            output = call_model(staged.model, inputs)
            if (
                self.stage < len(staged.devices) - 1
            ):  # a branch has left stages out, and others wait for their turn there
                self.forward_to(len(staged.devices) - 1)
                output = move(output, staged.devices[-1])
            targets = move(self.micro.targets, staged.devices[-1])
            self.loss = job.weighted_loss(output, Micro(None, targets, self.micro.share))
            self._counting.__exit__(None, None, None)
        self._leave("forward")

    def forward_to(self, stage: int) -> None:
        """Through every stage on the way, in order: micro-batches take turns at each."""
        while self.stage < stage:
            self._counting.__exit__(None, None, None)
            self._leave("forward")
            self._enter(self.stage + 1)
            self._count()

    def backward(self) -> None:
        self.staged.current.passage, self.returning = self, True
        self._enter(len(self.staged.devices) - 1)
        if self.last:
            self.staged.before_last_backward(self.stage)
        with self.staged.job.drawing(lambda: self.stage):
            self.staged.job.precision.backward(self.loss)
        self.backward_to(0)  # the first stages may be frozen: no gradient reaches them
        self._leave("backward")

    def backward_to(self, stage: int) -> None:
        while self.stage > stage:
            self._leave("backward")
            self._enter(self.stage - 1)
            if self.last:
                self.staged.before_last_backward(self.stage)

    def finish(self) -> torch.Tensor:
        """The loss, free of its graph. The graph refers to this passage, so keeping it here would
        keep both for ever."""
        loss = self.loss.detach()
        del self.loss, self.micro
        return loss

    def _count(self) -> None:
        self._counting = self.staged.job.meter.counting(self.staged.names[self.stage])
        self._counting.__enter__()

    def _enter(self, stage: int) -> None:
        self.stage = stage
        if self.turns:
            self.turns.enter(stage, self.number)
        if self.staged.job.probe.detailed:
            self.start: Mark = self.staged.job.probe.clock.mark(self.staged.names[stage])

    def _leave(self, direction: str) -> None:
        probe, device = self.staged.job.probe, self.staged.names[self.stage]
        if probe.detailed:
            where = {
                "device": device,
                "stage": self.stage,
                "micro": self.number,
                "accumulation": self.accumulation,
            }
            probe.note(direction, self.start, probe.clock.mark(device), **where)
        if self.turns:
            self.turns.leave(self.stage, self.number)


class _Crossing(torch.autograd.Function):
    """From one stage to the next: moves tensors forward, and gradients back."""

    @staticmethod
    def forward(
        ctx: Any, passage: Passage, stage: int, device: torch.device, *values: torch.Tensor
    ) -> Any:
        """`stage`: the one that the values come from."""
        ctx.passage, ctx.stage, ctx.came_from = passage, stage, [value.device for value in values]
        # Always a copy: an output that is its input would be no node of the graph, and a view may
        # not be changed in place.
        return tuple(move(value, device, copy=True) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.passage.backward_to(ctx.stage)
        moved = (move(grad, device) for grad, device in zip(grads, ctx.came_from, strict=True))
        return None, None, None, *moved
