"""Let blocks of a model process this rank's part of the sequence.

    whole sequence ─► cut ─► [ block ]─►[ block ]─►[ block ] ─► join ─► whole sequence

Inside the blocks, each rank has all heads for its part of the sequence. Before attention, the ranks
exchange these for some heads of the whole sequence, and afterward they exchange the results back.
So torch's attention sees all tokens, and causal flags and masks work as on one device.

Parameters inside the blocks get gradients only from this rank's tokens, so the ranks sum these
gradients. All ranks compute everything outside the blocks, and get equal gradients there.

Sequence parallelism (`split_tokens`) uses the same blocks. Its attention is in split layers, which
get the whole sequence:

    part ─► norm ─► join ─► [ columns ► heads ► rows ] ─► sum, and take a part ─► residual, norm
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paralab.errors import ParalabError
from paralab.plan.sequence_splits import too_short
from paralab.units import plural
from paralab.worker.sharding.sequence_parts import HEADS, TOKENS, Ranks
from paralab.worker.sharding.shard_streams import ShardStreams
from paralab.worker.sum_gradients import Begin, sum_gradients
from paralab.workload.batch import map_tensors, tensors
from paralab.workload.hooks import patched
from paralab.workload.sequence_plan import SplitBlock, part_sizes

ArgumentCounts = dict[str, set[int]]  # block -> the numbers of its tensor arguments


class SplitSequence:
    """Splits the sequence in these blocks of a model."""

    def __init__(
        self,
        model: nn.Module,
        blocks: tuple[SplitBlock, ...],
        group: dist.ProcessGroup | None,
        begin_inside: Begin,
        begin: Begin,
        flag: str = "cp",
    ) -> None:
        self.ranks, self.begin, self.flag = Ranks(group, begin_inside), begin, flag
        self.blocks = blocks
        self.seen: ArgumentCounts | None = None  # set in the proof of the whole model
        self.streams: ShardStreams | None = None  # set if the blocks draw random numbers
        self.length: int | None = None  # length of the whole sequence, while inside a block
        self.lengths: dict[str, int] = {}  # block -> the length in its last call
        parameters: dict[nn.Parameter, None] = {}
        for block in blocks:
            module = model.get_submodule(block.name)
            parameters |= dict.fromkeys(module.parameters())
            self._watch(module, block)
        self.parameters = list(parameters)

    def _watch(self, module: nn.Module, block: SplitBlock) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            inside = self._enter(block, (args, kwargs))
            if self.streams:
                self.streams.enter(block.name)
            return inside

        def leave(_: nn.Module, args: Any, output: Any) -> Any:
            if self.streams:
                self.streams.leave(block.name)
            outside = self._leave(block, output)
            self.length = None
            return outside

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)
        for name in block.joined:
            inner = module.get_submodule(name)
            inner.register_forward_pre_hook(lambda _, *both: self._join(both), with_kwargs=True)

    def _enter(self, block: SplitBlock, arguments: Any) -> Any:
        """Take this rank's part of the arguments."""
        numbers, cut, parts = count(), dict(block.cut), dict(block.parts)
        lengths = {self.lengths[block.after]} if block.after else set()

        def take(tensor: torch.Tensor) -> torch.Tensor:
            number = next(numbers)
            if number in cut:
                lengths.add(tensor.shape[cut[number]])
                return self.ranks.cut(tensor, cut[number])
            if number in parts:
                self._require_part(tensor, parts[number], self.lengths[block.after])
                return tensor
            return self.ranks.copy(tensor) if tensor.requires_grad else tensor

        inside = map_tensors(take, arguments)
        given = next(numbers)
        if self.seen is not None and {*cut, *parts} == {
            0
        }:  # a missing mask changes no other number
            self.seen[block.name].add(given)
        elif given not in block.arguments:
            known = " or ".join(map(str, block.arguments))
            raise ParalabError(
                f"{self.flag}: {block.name} got {plural(given, 'tensor')}, but {known} in the proof, "
                "which used the first samples. For example, it may get a mask only for some samples.",
                fix="a model that always passes the same arguments, or another strategy",
            )
        if len(lengths) != 1:
            sizes = " and ".join(map(str, sorted(lengths))) or "no"
            problem = (
                f"{self.flag}: {block.name} got sequences of {sizes} tokens, but needs one length."
            )
            raise ParalabError(problem, fix="another strategy for this model")
        [self.length] = lengths
        if reason := too_short(self.length, self.ranks.size):
            raise ParalabError(f"{self.flag}: {reason}.", fix="fewer --shards, or longer sequences")
        self.lengths[block.name] = self.length
        return inside

    def _join(self, arguments: Any) -> Any:
        """Join the first argument that is a part, which may be query, key, and value. All others are
        already whole, even if another sequence happens to be as long as the part."""
        assert self.length is not None
        own = part_sizes(self.length, self.ranks.size)[self.ranks.rank]
        candidates = (t for t in tensors(arguments) if t.is_floating_point() and t.ndim > 2)
        part = next((tensor for tensor in candidates if tensor.shape[TOKENS] == own), None)
        if part is None:
            return arguments
        whole = self.ranks.join(part, TOKENS, self.length)
        return map_tensors(lambda tensor: whole if tensor is part else tensor, arguments)

    def sum_to_part(self, whole: torch.Tensor) -> torch.Tensor:
        return self.ranks.sum_to_part(whole, TOKENS)

    def _leave(self, block: SplitBlock, output: Any) -> Any:
        """Join the outputs of all ranks."""
        numbers, gathered, length = count(), dict(block.gathered), self.lengths[block.name]

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            if (number := next(numbers)) not in gathered:
                return tensor
            self._require_part(tensor, gathered[number], length)
            return self.ranks.gather(tensor, gathered[number], length)

        return map_tensors(gather, output)

    def _require_part(self, tensor: torch.Tensor, dim: int, length: int) -> None:
        own = part_sizes(length, self.ranks.size)[self.ranks.rank]
        if tensor.shape[dim] != own:
            raise ParalabError(
                f"{self.flag}: a tensor of shape {tuple(tensor.shape)} should have {plural(own, 'token')} in "
                f"dim {dim}, this rank's part of {length}.",
                fix="another strategy for this model",
            )

    def attending(self) -> AbstractContextManager[None]:
        """In this context, attention exchanges sequence parts for heads."""
        functional = nn.functional
        attend = self._attend(functional.scaled_dot_product_attention)
        return patched(functional, scaled_dot_product_attention=attend)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Run forward and backward passes in this context, which sums the gradients at its end."""
        with self.attending():
            yield
        self.sum_gradients()

    def sum_gradients(self) -> None:
        sum_gradients(self.parameters, self.ranks.group, None, self.begin)

    def recomputing(self, block: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that creates a context for recomputing a block with this call's
        sequence length. Recomputation does not run the block's hooks."""
        length = self.length
        return lambda: patched(self, length=length)

    def _attend(self, attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def attend(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attn_mask: torch.Tensor | None = None,
            *more: Any,
            **named: Any,
        ) -> torch.Tensor:
            length = self.length
            if length is None:
                return attention(query, key, value, attn_mask, *more, **named)
            for tensor in (query, key, value):
                self._require_part(tensor, TOKENS, length)
            if attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[HEADS] > 1:
                attn_mask = attn_mask.chunk(self.ranks.size, HEADS)[self.ranks.rank]
            heads = self.ranks.to_heads(length, query, key, value)
            attended = attention(*heads, attn_mask, *more, **named)
            [part] = self.ranks.to_parts(length, attended)
            return part

        return attend
