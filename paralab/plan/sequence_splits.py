"""Propose how to split the sequence in a block: which arguments to split, and which outputs to
join. These are pure functions on plain numbers. A proof tests the proposals.

    hidden states    (2, 33, 64)        part of dim 1
    rotary cosines   (1, 33, 16)        part of dim 1
    position ids     (2, 33)            part of dim 1
    attention mask   (2, 1, 33, 33)     whole: attention sees the whole sequence
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paralab.plan.tensor_groups import uneven_heads
from paralab.workload.sequence_plan import Dims, SplitBlock

FEWEST_TOKENS = 2  # per rank, because models often treat a single token as text generation
Shape = tuple[int, ...]


@dataclass(frozen=True)
class AttentionCall:
    """The sizes in a call to F.scaled_dot_product_attention. The number of heads is 0 for tensors
    with fewer than 3 dims."""

    heads: int
    key_heads: int
    tokens: int
    key_tokens: int


@dataclass(frozen=True)
class ObservedBlock:
    """One call of a block.

    arguments  the shapes of the tensor arguments
    floating   which of these arguments contain floating-point numbers
    outputs    the shapes of the output tensors
    attention  the calls of F.scaled_dot_product_attention
    draws      whether the block draws random numbers, with dropout off
    after      the block whose output this block processes; empty if none
    linked     arguments that are outputs of `after`: (argument, output)
    """

    name: str
    arguments: tuple[Shape, ...]
    floating: tuple[bool, ...]
    outputs: tuple[Shape, ...]
    attention: tuple[AttentionCall, ...]
    draws: bool = False
    after: str = ""
    linked: Dims = ()

    @property
    def lengths(self) -> set[int]:
        return {size for call in self.attention for size in (call.tokens, call.key_tokens)}


def unsuitable(block: ObservedBlock, shards: int) -> str | None:
    """Return why the sequence cannot be split in this block, or None."""
    if not block.attention:
        return "it does not call torch.nn.functional.scaled_dot_product_attention"
    if block.draws:
        return "it uses random numbers outside dropout, and each part would draw different ones"
    if len(block.lengths) > 1:
        lengths = " and ".join(map(str, sorted(block.lengths)))
        return f"it attends to sequences of different lengths ({lengths} tokens)"
    for call in block.attention:
        for heads in (call.heads, call.key_heads):
            if heads == 0:
                return "its attention has no dim for heads"
            if reason := uneven_heads(heads, shards):
                return reason
    return too_short(block.attention[0].tokens, shards)


def too_short(length: int, shards: int) -> str | None:
    """Return why so few tokens cannot be split, or None."""
    if length >= FEWEST_TOKENS * shards:
        return None
    least = f"each needs at least {FEWEST_TOKENS}"
    return f"{length} tokens cannot be split over {shards} shards: {least}"


def attempts(block: ObservedBlock) -> Iterator[SplitBlock]:
    """Yield ways to split a block, the most likely first."""
    length = block.attention[0].tokens
    dims = [[d for d, size in enumerate(shape) if size == length] for shape in block.arguments]
    hidden = next((n for n, is_float in enumerate(block.floating) if is_float and dims[n]), None)
    if hidden is None:
        return
    for dim in sorted(dims[hidden], key=lambda d: d != len(block.arguments[hidden]) - 2):
        usual: dict[int, int] = {hidden: dim}
        whole: dict[int, int] = {}
        for number, shape in enumerate(block.arguments):
            if number != hidden and dims[number]:
                best = dim if dim in dims[number] else dims[number][-1]
                is_mask = shape[-2:] == (length, length)
                (whole if is_mask else usual)[number] = best
        gathered = tuple(
            (number, dim)
            for number, shape in enumerate(block.outputs)
            if len(shape) > dim and shape[dim] == length
        )
        split = SplitBlock(block.name, (len(dims),), len(block.attention), gathered=gathered)
        yield replace(split, cut=tuple(sorted(usual.items())))
        for number, own in (whole | usual).items():
            if number != hidden:
                other = {n: d for n, d in usual.items() if n != number}
                other |= {number: own} if number in whole else {}
                yield replace(split, cut=tuple(sorted(other.items())))


def chain(blocks: Sequence[SplitBlock], observed: Sequence[ObservedBlock]) -> list[SplitBlock]:
    """Let blocks pass their parts directly to the next block if it uses the outputs unchanged."""
    chained = {block.name: block for block in blocks}
    for seen in observed:
        before, block = chained.get(seen.after), chained.get(seen.name)
        if not before or not block or not before.kept or not block.kept:
            continue
        cut, gathered = dict(block.cut), dict(before.gathered)
        if any(n not in cut or gathered.get(out) != cut[n] for n, out in seen.linked):
            continue
        parts = tuple((n, cut[n]) for n, _ in seen.linked)
        taken = {out for _, out in seen.linked}
        chained[seen.name] = replace(
            block,
            cut=tuple(each for each in block.cut if each not in parts),
            after=seen.after,
            parts=parts,
        )
        rest = tuple(each for each in before.gathered if each[0] not in taken)
        chained[seen.after] = replace(before, gathered=rest)
    return [chained[block.name] for block in blocks]
