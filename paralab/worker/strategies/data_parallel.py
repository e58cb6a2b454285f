"""`dp`: the real `nn.DataParallel` on CUDA. On a CPU, nn.DataParallel silently does nothing, so we
run the same algorithm on virtual devices.

scatter      split the batch like torch.chunk: 64 samples over 3 replicas -> 22 22 20
replicate    in each step, copy the parameters to each replica
apply        run each replica in its own thread
gather       collect the outputs on device 0, which computes the loss
(backward)   run each replica's backward in its thread, then add up the gradients on device 0
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from paralab.errors import UsageError
from paralab.plan.batches import chunk_sizes, spans
from paralab.plan.check_model import UNGATHERED
from paralab.worker.measure.memory import addresses, num_bytes
from paralab.worker.rank_context import AccumulationStep, RankContext, Strategy
from paralab.workload.batch import call_model, map_tensors, num_samples, take, tensors
from paralab.workload.state import copy_of


class DataParallel(Strategy):
    def __init__(self, context: RankContext, model: nn.Module) -> None:
        self.context = context
        self.model = model.to(context.rank.devices[0].torch)
        self.parallel: nn.Module
        if context.plan.device == "cuda":
            ids = [torch.device(device.torch).index for device in context.rank.devices]
            self.parallel = TimedDataParallel(context, self.model, ids)
            # nn.DataParallel copies the module's hooks to its replicas.
            context.note_split.watch(self.model)
        else:
            self.parallel = VirtualDataParallel(context, self.model)

    def forward_backward(self, accumulation_steps: list[AccumulationStep]) -> torch.Tensor:
        return self.accumulate(self.parallel, accumulation_steps)


class TimedDataParallel(nn.DataParallel[nn.Module]):
    """The real nn.DataParallel, with spans on the first device's clock. Summing the gradients
    is part of the backward pass, so it cannot be timed separately."""

    def __init__(self, context: RankContext, module: nn.Module, ids: list[int]) -> None:
        super().__init__(module, device_ids=ids)
        self.context = context
        for phase in ("scatter", "replicate", "gather"):
            setattr(self, phase, self._timed(phase, getattr(self, phase)))

    def gather(self, outputs: list[Any], output_device: Any) -> Any:
        _require_equal_dims([list(tensors(output)) for output in outputs])
        return super().gather(outputs, output_device)

    def _timed(self, phase: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.context.probe.span(phase, device=self.context.rank.devices[0].name):
                return run(*args, **kwargs)

        return call

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        if self.context.streams:
            replicas = [self._with_stream(*numbered) for numbered in enumerate(replicas)]
        return super().parallel_apply(replicas, inputs, kwargs)

    def _with_stream(self, number: int, replica: nn.Module) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.context.drawing(lambda: number):
                return replica(*args, **kwargs)

        return call


class VirtualDataParallel(nn.Module):
    """nn.DataParallel's algorithm on virtual devices. Replica 0 is the module itself."""

    def __init__(self, context: RankContext, module: nn.Module) -> None:
        super().__init__()
        self.context = context
        self.names = [device.name for device in context.rank.devices]
        self.replicas = [module, *(copy_of(module) for _ in self.names[1:])]
        for replica in self.replicas[1:]:
            context.meter.ignored |= addresses(replica.parameters())
        copied = num_bytes([*module.parameters(), *module.buffers()])
        self.copied_bytes = copied * (len(self.names) - 1)  # bytes copied per step
        self.threads = ThreadPoolExecutor(len(self.names), thread_name_prefix="paralab-replica")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        span = self.context.probe.span
        inputs = kwargs or args  # a tuple of one dict stays a tuple
        with span("scatter", bytes=num_bytes(inputs)):
            sizes = chunk_sizes(num_samples(inputs), len(self.names))
            parts = [take(inputs, *piece) for piece in spans(sizes)]

        with span("replicate", bytes=self.copied_bytes):
            self._replicate()

        outputs = list(self.threads.map(self.forward_replica, range(len(parts)), parts))
        with span("gather", bytes=num_bytes(outputs)):
            return self._gather(outputs)

    @torch.no_grad()
    def _replicate(self) -> None:
        """Copy parameters and buffers to the replicas. As in nn.DataParallel, buffer updates
        (BatchNorm statistics) survive only on replica 0."""
        source = [*self.replicas[0].parameters(), *self.replicas[0].buffers()]
        for replica in self.replicas[1:]:
            target = [*replica.parameters(), *replica.buffers()]
            for to, origin in zip(target, source, strict=True):
                to.copy_(origin)
            replica.zero_grad(set_to_none=True)

    def forward_replica(self, number: int, inputs: Any) -> Any:
        context, device, replica = self.context, self.names[number], self.replicas[number]
        context.note_split(device, inputs)
        with (
            context.precision.autocast(),
            context.meter.counting(device),
            context.drawing(lambda: number),
            context.probe.span("replica_forward", device=device, replica=number),
        ):
            return call_model(replica, inputs)

    def _gather(self, outputs: list[Any]) -> Any:
        """Concatenate the outputs in one graph node, which runs each replica's backward pass."""
        flat = [list(tensors(output)) for output in outputs]
        _require_equal_dims(flat)
        if not flat[0]:
            raise UsageError(
                f"The model's output is a {type(outputs[0]).__name__} without tensors, so it "
                "cannot be gathered.",
                fix="return tensors, or tuples, dicts, or dataclasses of tensors",
            )
        connected = torch.ones((), requires_grad=True)  # makes autograd call _Gather.backward
        gathered = iter(_Gather.apply(self, flat, connected))  # type: ignore[no-untyped-call]
        return map_tensors(lambda _: next(gathered), outputs[0])

    def backward_replica(
        self, number: int, outputs: list[torch.Tensor], grads: tuple[torch.Tensor | None, ...]
    ) -> None:
        both = zip(outputs, grads, strict=True)
        pairs = [(o, g) for o, g in both if o.requires_grad and g is not None]
        device, span = self.names[number], self.context.probe.span
        with span("replica_backward", device, replica=number), self.context.drawing(lambda: number):
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])

    def reduce(self, used: int) -> None:
        """Add the gradients of replicas 1 … used-1 to those of replica 0."""
        first = list(self.replicas[0].parameters())
        with self.context.probe.span("reduce", bytes=sum(p.nbytes for p in first) * (used - 1)):
            for replica in self.replicas[1:used]:
                for to, origin in zip(first, replica.parameters(), strict=True):
                    if origin.grad is not None and to.grad is not None:
                        to.grad.add_(origin.grad)
                    elif origin.grad is not None:
                        to.grad = origin.grad
                    origin.grad = None


def _require_equal_dims(flat: list[list[torch.Tensor]]) -> None:
    """Raise unless the replicas' outputs can be concatenated along dim 0."""
    for column in zip(*flat, strict=False):
        if len({tensor.shape[1:] for tensor in column}) > 1:
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in column[-2:])
            raise UsageError(
                f"{UNGATHERED} along dim 0: replicas return tensors of shapes {shapes}.",
                fix="outputs with the samples in dim 0 and equal other dims, or use ddp",
            )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parallel: VirtualDataParallel, flat: list[list[torch.Tensor]], connected: Any
    ) -> Any:
        ctx.parallel, ctx.flat = parallel, flat
        ctx.set_materialize_grads(False)  # parameters of outputs without a gradient get none either
        columns = zip(*flat, strict=True)
        return tuple(torch.cat([tensor.detach() for tensor in column]) for column in columns)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        parallel, flat = ctx.parallel, ctx.flat
        columns = zip(*flat, strict=True)
        sizes = [[len(tensor) for tensor in column] for column in columns]
        missing = [None] * len(flat)
        split = (
            missing if grad is None else grad.split(parts)
            for grad, parts in zip(grads, sizes, strict=True)
        )
        pieces = zip(*split, strict=True)
        list(parallel.threads.map(parallel.backward_replica, range(len(flat)), flat, pieces))
        parallel.reduce(len(flat))
        return None, None, None
