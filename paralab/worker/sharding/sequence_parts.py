"""Split a sequence into one part per rank, join the parts, and exchange sequence parts for heads.
In backward, each function moves the gradients in the opposite direction.

             rank 0                      rank 1
    parts    all heads, tokens 0 … 16    all heads, tokens 17 … 32
    heads    heads 0 and 1, all tokens   heads 2 and 3, all tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paralab.worker.sum_gradients import Begin
from paralab.workload.sequence_plan import part_sizes

HEADS, TOKENS = -3, -2  # the dims of queries, keys, and values


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a sequence. `begin` records the start of a collective, and returns a
    function to call at its end."""

    group: dist.ProcessGroup | None
    begin: Begin

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        part: torch.Tensor = _Cut.apply(whole, self, dim)  # type: ignore[no-untyped-call]
        return part

    def gather(self, part: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        whole: torch.Tensor = _Gather.apply(part, self, dim, length)  # type: ignore[no-untyped-call]
        return whole

    def join(self, part: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """Return the whole sequence, from which each rank computes something different. In
        backward, sum the ranks' gradients, and take this rank's part."""
        whole: torch.Tensor = _Join.apply(part, self, dim, length)  # type: ignore[no-untyped-call]
        return whole

    def sum_to_part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Sum over the ranks, and take this rank's part."""
        part: torch.Tensor = _SumToPart.apply(whole, self, dim)  # type: ignore[no-untyped-call]
        return part

    def copy(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the tensor unchanged. In backward, sum its gradient over the ranks."""
        copied: torch.Tensor = _Copy.apply(whole, self)  # type: ignore[no-untyped-call]
        return copied

    def to_heads(self, length: int, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Exchange a part of the sequence with all heads for the whole sequence with some heads."""
        heads: tuple[torch.Tensor, ...] = _Exchange.apply(self, length, True, *parts)  # type: ignore[no-untyped-call]
        return heads

    def to_parts(self, length: int, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts: tuple[torch.Tensor, ...] = _Exchange.apply(self, length, False, *heads)  # type: ignore[no-untyped-call]
        return parts

    def own_part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a copy, so that the whole tensor can be freed."""
        sizes = part_sizes(whole.shape[dim], self.size)
        part: torch.Tensor = whole.split(sizes, dim)[self.rank]
        return part.clone(memory_format=torch.contiguous_format)

    def put_together(self, part: torch.Tensor, dim: int, length: int, unit: str) -> torch.Tensor:
        """Gather all parts. An all-gather needs equal sizes, so pad the shorter parts."""
        sizes = part_sizes(length, self.size)
        rows = part.movedim(dim, 0)
        filled = rows.new_zeros((sizes[0], *rows.shape[1:]))
        filled[: len(rows)] = rows
        parts = [torch.empty_like(filled) for _ in sizes]
        note = self.begin("all_gather", filled, self.group, unit)
        dist.all_gather(parts, filled, group=self.group)
        note()
        whole = torch.cat([each[:size] for each, size in zip(parts, sizes, strict=True)])
        return whole.movedim(0, dim).contiguous()

    def reduce(self, whole: torch.Tensor, dim: int, unit: str) -> torch.Tensor:
        """Sum over the ranks, and return this rank's part. Pad as in `put_together`."""
        sizes = part_sizes(whole.shape[dim], self.size)
        rows = whole.movedim(dim, 0)
        filled = rows.new_zeros((self.size, sizes[0], *rows.shape[1:]))
        for place, part in zip(filled, rows.split(sizes), strict=True):
            place[: len(part)] = part
        own = torch.empty_like(filled[0])
        note = self.begin("reduce_scatter", filled, self.group, unit)
        dist.reduce_scatter_tensor(own, filled.flatten(0, 1), group=self.group)
        note()
        return own[: sizes[self.rank]].movedim(0, dim).contiguous()

    def exchange(
        self, tensors: tuple[torch.Tensor, ...], length: int, to_heads: bool, unit: str
    ) -> tuple[torch.Tensor, ...]:
        """Send each rank its heads or its part of the sequence, in one all-to-all."""
        sizes, ranks = part_sizes(length, self.size), range(self.size)
        kept = dict.fromkeys(ranks, sizes[self.rank])
        tokens = dict(enumerate(sizes)) if to_heads else kept  # tokens from each rank
        outgoing: list[list[torch.Tensor]] = [[] for _ in ranks]
        shapes: list[list[list[int]]] = [[] for _ in ranks]
        for tensor in tensors:
            pieces = tensor.chunk(self.size, HEADS) if to_heads else tensor.split(sizes, TOKENS)
            heads = pieces[0].shape[HEADS]
            for rank in ranks:
                outgoing[rank].append(pieces[rank].flatten())
                before, last = tensor.shape[:HEADS], tensor.shape[-1]
                shapes[rank].append([*before, heads, tokens[rank], last])

        numbers = [[torch.Size(shape).numel() for shape in each] for each in shapes]
        flat = [torch.cat(each) for each in outgoing]
        sent = torch.cat(flat)
        received = sent.new_empty(sum(map(sum, numbers)))
        note = self.begin("all_to_all", sent, self.group, unit)
        dist.all_to_all_single(
            received, sent, list(map(sum, numbers)), list(map(len, flat)), group=self.group
        )
        note()

        rows = []
        for each, own, count in zip(
            received.split(list(map(sum, numbers))), shapes, numbers, strict=True
        ):
            rows.append([p.view(s) for p, s in zip(each.split(count), own, strict=True)])
        dim = TOKENS if to_heads else HEADS
        joined = (torch.cat(pieces, dim) for pieces in zip(*rows, strict=True))
        return tuple(new.to(old.dtype) for new, old in zip(joined, tensors, strict=True))


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, ranks: Ranks, dim: int) -> torch.Tensor:
        ctx.given = ranks, dim, whole.shape[dim]
        return ranks.own_part(whole, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ranks, dim, length = ctx.given
        return ranks.put_together(grads[0], dim, length, "gradients"), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: Ranks, dim: int, length: int) -> torch.Tensor:
        ctx.given = ranks, dim
        return ranks.put_together(part, dim, length, "activations")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ranks, dim = ctx.given
        return ranks.own_part(grads[0], dim), None, None, None


class _Join(_Gather):
    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ranks, dim = ctx.given
        return ranks.reduce(grads[0], dim, "gradients"), None, None, None


class _SumToPart(_Cut):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, ranks: Ranks, dim: int) -> torch.Tensor:
        ctx.given = ranks, dim, whole.shape[dim]
        return ranks.reduce(whole, dim, "activations")


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total, ranks = grads[0].clone(memory_format=torch.contiguous_format), ctx.ranks
        note = ranks.begin("all_reduce", total, ranks.group, "gradients")
        dist.all_reduce(total, group=ranks.group)
        note()
        return total, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, length: int, to_heads: bool, *tensors: torch.Tensor) -> Any:
        ctx.given = ranks, length, to_heads
        return ranks.exchange(tensors, length, to_heads, "activations")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ranks, length, to_heads = ctx.given
        back = ranks.exchange(grads, length, not to_heads, "gradients")
        return None, None, None, *back
