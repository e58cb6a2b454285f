"""`ddp --compress`: the data that DDP's communication hook sends instead of a gradient bucket.

fp16, bf16   the rounded gradients; the sum over the ranks is rounded again
powersgd     two thin matrices whose product approximates a large gradient matrix (see
             power_sgd.py); each rank adds its approximation error to its next gradient
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook

from paralab.errors import ParalabError
from paralab.plan.lossy import CASTS, POWERSGD_START
from paralab.plan.plan import Plan
from paralab.worker.power_sgd import EPSILON, starting_vectors
from paralab.workload.hooks import patched

Future = torch.futures.Future[torch.Tensor]
Begin = Callable[[str, torch.Tensor], Callable[[], None]]  # like `Probe.begin_collective`
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Cast:
    """Rounds gradients to a 2-byte dtype.

    With `in_order`, add the ranks' values in rank order and round once, as `local` does. gloo and
    NCCL round after each addition, in a different order.
    """

    def __init__(self, plan: Plan, group: dist.ProcessGroup) -> None:
        assert plan.compress
        self.dtype, self.group = DTYPES[plan.compress], group
        self.in_order = "rank_order" in plan.control
        self.can_overflow = plan.compress == "fp16" and not plan.scaler
        self.overflows: list[torch.Tensor] = []

    def reduce(self, bucket: Any, begin: Begin) -> Future:
        buffer = bucket.buffer()
        rounded = buffer.to(self.dtype)

        def decompress(total: torch.Tensor) -> torch.Tensor:
            if self.can_overflow:
                self.overflows.append(torch.isinf(total).any())
            buffer.copy_(total)
            return buffer  # type: ignore[no-any-return]

        if self.in_order:
            note = begin("all_gather", rounded)
            every = [torch.empty_like(rounded) for _ in range(self.group.size())]
            dist.all_gather(every, rounded, self.group)
            note()
            total = every[0].float()
            for each in every[1:]:
                total += each.float()
            return _finished(decompress(total.to(self.dtype)))

        note = begin("all_reduce", rounded)
        work = dist.all_reduce(rounded, group=self.group, async_op=True)

        def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            note()
            return decompress(future.value()[0])

        finished: Future = work.get_future().then(done)
        return finished

    def require_finite(self, step: int) -> None:
        """Raise if a sum is infinite in fp16. A GradScaler would skip the step instead."""
        infinite = any(bool(each) for each in self.overflows)
        self.overflows.clear()
        if infinite:
            raise ParalabError(
                f"--compress fp16: in step {step}, a gradient is infinite in fp16, whose largest "
                "number is 65504.",
                fix="--compress bf16, which has the range of fp32, or --precision fp16, whose "
                "GradScaler skips such steps",
            )

    def own_state(self) -> dict[str, Any]:
        return {}

    def restore_own(self, state: dict[str, Any]) -> None:
        pass


class PowerSgd:
    """Wraps torch's hook. The hook averages gradients, so multiply them by the number of ranks
    first.

    torch's hook starts all-reduces in callbacks. With multiple buckets, ranks could start them in
    different orders, so wait for each all-reduce immediately.
    """

    def __init__(self, plan: Plan, group: dist.ProcessGroup, model: nn.Module) -> None:
        self.seed, self.group = plan.seed, group
        self.device = next(model.parameters()).device
        self.numbers = {id(p): number for number, p in enumerate(model.parameters())}
        self.state = torch_hook.PowerSGDState(
            group,
            matrix_approximation_rank=plan.powersgd_rank,
            start_powerSGD_iter=POWERSGD_START,
            orthogonalization_epsilon=EPSILON,
        )
        self.layout: dict[int, list[int]] = {}  # bucket -> parameter numbers

    def reduce(self, bucket: Any, begin: Begin) -> Future:
        if self.state.iter < POWERSGD_START:
            self.state.maybe_increase_iter(bucket)
            buffer = bucket.buffer()
            WaitingCollectives(begin).all_reduce(buffer, self.group)
            return _finished(buffer)

        numbers = [self.numbers[id(parameter)] for parameter in bucket.parameters()]
        if self.layout.get(bucket.index()) != numbers:
            self._start(bucket, numbers)
        bucket.buffer().mul_(self.group.size())
        with patched(torch_hook, dist=WaitingCollectives(begin)):
            future: Future = torch_hook.powerSGD_hook(self.state, bucket)
        return future

    def _start(self, bucket: Any, numbers: list[int]) -> None:
        """Initialize a bucket's memory. The starting vectors depend on the parameter, not on the
        bucket. torch expects matrices of the same shape to be adjacent."""
        by_shape: dict[torch.Size, list[torch.Tensor]] = {}
        rows = 0
        for number, gradient in zip(numbers, bucket.gradients(), strict=True):
            matrix = gradient.view(gradient.shape[0], -1)
            vectors = starting_vectors(
                matrix, self.state.matrix_approximation_rank, self.seed + number
            )
            if vectors is not None:
                by_shape.setdefault(matrix.shape, []).append(vectors.flatten())
                rows += matrix.shape[0] * vectors.shape[1]
        index, buffer = bucket.index(), bucket.buffer()
        every = [vectors for group in by_shape.values() for vectors in group]
        self.state.p_memory_dict[index] = buffer.new_empty(rows)
        self.state.q_memory_dict[index] = torch.cat([buffer.new_empty(0), *every])
        self.state.error_dict.pop(index, None)
        self.layout[index] = numbers

    def require_finite(self, step: int) -> None:
        pass

    def own_state(self) -> dict[str, Any]:
        state = self.state
        memory = state.p_memory_dict, state.q_memory_dict, state.error_dict
        return {"iteration": state.iter, "layout": self.layout, "memory": list(memory)}

    def restore_own(self, state: dict[str, Any]) -> None:
        """Restore PowerSGD's memory on this rank, or clear it if the checkpoint has none."""
        self.layout = state.get("layout", {})
        self.state.iter = state.get("iteration", 0)
        memory = self.state.p_memory_dict, self.state.q_memory_dict, self.state.error_dict
        for current, saved in zip(memory, state.get("memory", [{}] * 3), strict=True):
            current.clear()
            current.update({index: tensor.to(self.device) for index, tensor in saved.items()})


class WaitingCollectives:
    """Replaces torch.distributed in torch's hook, and waits for each all-reduce."""

    def __init__(self, begin: Begin) -> None:
        self.begin = begin

    def all_reduce(
        self, tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = True
    ) -> Any:
        note = self.begin("all_reduce", tensor) if tensor.numel() else None
        work = dist.all_reduce(tensor, group=group, async_op=async_op)
        work.wait()
        if note:
            note()
        return work


Compression = Cast | PowerSgd


def make_compression(plan: Plan, group: dist.ProcessGroup, model: nn.Module) -> Compression | None:
    if plan.compress in CASTS:
        return Cast(plan, group)
    return PowerSgd(plan, group, model) if plan.compress else None


def _finished(tensor: torch.Tensor) -> Future:
    future: Future = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else [])
    future.set_result(tensor)
    return future
