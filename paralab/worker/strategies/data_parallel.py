"""`dp`: the real `nn.DataParallel` on CUDA; on a CPU, where that quietly does nothing, the same
algorithm over virtual devices.

scatter      the batch is cut as torch.chunk cuts it: 64 over 3 -> 22 22 20
replicate    the parameters are copied to every replica, at every step
apply        every replica runs its part in a thread of its own
gather       the outputs come together on device 0, where the loss is computed
(backward)   every replica's backward pass in its thread, then the gradients are added up on device 0
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from paralab.errors import UsageError
from paralab.plan.batches import chunk_sizes, spans
from paralab.worker.accumulation import accumulate
from paralab.worker.rank_context import Pass, RankContext
from paralab.workload.batch import call_model, map_tensors, num_samples, take, tensors


class DataParallel:
    def __init__(self, job: RankContext, model: nn.Module) -> None:
        self.job = job
        self.model = model.to(job.rank.devices[0].torch)
        self.parallel: nn.Module
        if job.plan.device == "cuda":
            ids = [torch.device(device.torch).index for device in job.rank.devices]
            self.parallel = TimedDataParallel(job, self.model, ids)
            # nn.DataParallel copies the module's hooks to its replicas, so this one runs inside
            # each of them.
            self.model.register_forward_pre_hook(self._show_inside, with_kwargs=True)
        else:
            self.parallel = VirtualDataParallel(job, self.model)

    def forward_backward(self, passes: list[Pass]) -> torch.Tensor:
        return accumulate(self.job, self.parallel, passes)

    def _show_inside(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        x = next(tensors((args, kwargs)))
        self.job.show_split(str(x.device), x.device, x.shape)


class TimedDataParallel(nn.DataParallel[nn.Module]):
    """The real one; its four steps are noted on the first device's clock. Adding the gradients up
    happens inside the backward pass, where it cannot be told from the rest."""

    def __init__(self, job: RankContext, module: nn.Module, ids: list[int]) -> None:
        super().__init__(module, device_ids=ids)
        self.job, self.span, self.device = job, job.probe.span, job.rank.devices[0].name

    def scatter(self, *args: Any, **kwargs: Any) -> Any:
        with self.span("scatter", device=self.device):
            return super().scatter(*args, **kwargs)

    def replicate(self, *args: Any, **kwargs: Any) -> Any:
        with self.span("replicate", device=self.device):
            return super().replicate(*args, **kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        with self.span("gather", device=self.device):
            return super().gather(*args, **kwargs)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        return super().parallel_apply(
            [self._drawing(*numbered) for numbered in enumerate(replicas)], inputs, kwargs
        )

    def _drawing(self, number: int, replica: nn.Module) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.job.drawing(lambda: number):
                return replica(*args, **kwargs)

        return call if self.job.streams else replica


class VirtualDataParallel(nn.Module):
    """nn.DataParallel's algorithm over virtual devices. Replica 0 is the module itself; the others
    are copies."""

    def __init__(self, job: RankContext, module: nn.Module) -> None:
        super().__init__()
        self.job = job
        self.names = [device.name for device in job.rank.devices]
        self.replicas = [module, *(copy.deepcopy(module) for _ in self.names[1:])]
        for replica in self.replicas[1:]:
            job.meter.ignore(replica.parameters())
        held = sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
        self.copied_bytes = held * (
            len(self.names) - 1
        )  # in every step, to the replicas other than 0
        self.threads = ThreadPoolExecutor(len(self.names), thread_name_prefix="paralab-replica")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        probe = self.job.probe
        inputs = kwargs or (args if len(args) > 1 else args[0])
        with probe.span("scatter", bytes=sum(tensor.nbytes for tensor in tensors(inputs))):
            parts = [
                take(inputs, *span)
                for span in spans(chunk_sizes(num_samples(inputs), len(self.names)))
            ]
        with probe.span("replicate", bytes=self.copied_bytes):
            self._replicate()
        outputs = list(self.threads.map(self.forward_replica, range(len(parts)), parts))
        with probe.span(
            "gather", bytes=sum(tensor.nbytes for output in outputs for tensor in tensors(output))
        ):
            return self._gather(outputs)

    @torch.no_grad()
    def _replicate(self) -> None:
        """Copy parameters and buffers to the replicas. As with nn.DataParallel, what a replica
        other than 0 writes into its buffers (BatchNorm's statistics) is lost here."""
        source = [*self.replicas[0].parameters(), *self.replicas[0].buffers()]
        for replica in self.replicas[1:]:
            target = [*replica.parameters(), *replica.buffers()]
            for to, origin in zip(target, source, strict=True):
                to.copy_(origin)
            replica.zero_grad(set_to_none=True)

    def forward_replica(self, number: int, inputs: Any) -> Any:
        device, replica = self.names[number], self.replicas[number]
        x = next(tensors(inputs))
        self.job.show_split(device, x.device, x.shape)
        with (
            self.job.precision.autocast(),
            self.job.meter.counting(device),
            self.job.drawing(lambda: number),
        ):
            with self.job.probe.span("replica_forward", device=device, replica=number):
                return call_model(replica, inputs)

    def _gather(self, outputs: list[Any]) -> Any:
        """The outputs one below the other, as one node of the graph whose backward pass runs the
        replicas' own."""
        flat = [list(tensors(output)) for output in outputs]
        if not flat[0]:
            raise UsageError(
                f"The model's output is a {type(outputs[0]).__name__} in which no tensor was found, so it cannot be gathered.",
                fix="return tensors, or tuples, dicts or dataclasses of tensors",
            )
        connected = torch.ones((), requires_grad=True)  # so that autograd calls _Gather.backward
        gathered = iter(_Gather.apply(self, flat, connected))  # type: ignore[no-untyped-call]
        return map_tensors(lambda _: next(gathered), outputs[0])

    def backward_replica(
        self, number: int, outputs: list[torch.Tensor], grads: list[torch.Tensor]
    ) -> None:
        chosen = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        with (
            self.job.probe.span("replica_backward", device=self.names[number], replica=number),
            self.job.drawing(lambda: number),
        ):
            torch.autograd.backward([o for o, _ in chosen], [g for _, g in chosen])

    def reduce(self, used: int) -> None:
        """Add the gradients of replicas 1 … used-1 to those of replica 0."""
        with self.job.probe.span(
            "reduce", bytes=sum(p.nbytes for p in self.replicas[0].parameters()) * (used - 1)
        ):
            for replica in self.replicas[1:used]:
                for to, origin in zip(
                    self.replicas[0].parameters(), replica.parameters(), strict=True
                ):
                    if origin.grad is not None:
                        to.grad = (
                            origin.grad.clone() if to.grad is None else to.grad.add_(origin.grad)
                        )
                        origin.grad = None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        parallel: VirtualDataParallel,
        flat: list[list[torch.Tensor]],
        connected: torch.Tensor,
    ) -> Any:
        ctx.parallel, ctx.flat = parallel, flat
        return tuple(
            torch.cat([tensor.detach() for tensor in column]) for column in zip(*flat, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        parallel, flat = ctx.parallel, ctx.flat
        edges = [0]
        for outputs in flat:
            edges.append(edges[-1] + outputs[0].shape[0])
        pieces = [[grad[start:stop] for grad in grads] for start, stop in pairwise(edges)]
        list(parallel.threads.map(parallel.backward_replica, range(len(flat)), flat, pieces))
        parallel.reduce(len(flat))
        return None, None, None
