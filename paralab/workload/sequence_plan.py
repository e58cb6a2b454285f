"""The plain numbers of context parallelism: which blocks of a model process a part of the sequence,
and what is cut on the way in and put together on the way out."""

from __future__ import annotations

from dataclasses import dataclass

Dims = tuple[tuple[int, int], ...]  # (number of a tensor, its sequence dim)


@dataclass(frozen=True)
class SplitBlock:
    """A block. Its tensors are numbered in the order in which its call or its output has them.

    arguments   how many tensors it gets; with others, the proof says nothing
    attention   how often it calls attention, with an all-to-all before and after
    parameters  their number; their gradients are summed over the ranks
    cut         arguments of which each rank takes its part
    after       the block whose output it processes: that is this rank's part already; empty if none
    parts       the arguments that are the output of `after`
    gathered    outputs whose parts are put together; empty if the next block takes the part
    kept        whether the proof passed on all ranks
    error       the largest difference between the split and the plain block, relative to the
                largest value; None if one of them failed
    reason      why it is not kept
    """

    name: str
    arguments: int = 0
    attention: int = 0
    parameters: int = 0
    cut: Dims = ()
    after: str = ""
    parts: Dims = ()
    gathered: Dims = ()
    kept: bool = False
    error: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class SequencePlan:
    """The blocks of a model for a number of shards, and why they cannot be used, if so.

    length  the number of tokens in the trial; batches may differ
    """

    shards: int
    blocks: tuple[SplitBlock, ...]
    length: int = 0
    problem: str | None = None

    @property
    def kept(self) -> tuple[SplitBlock, ...]:
        return tuple(block for block in self.blocks if block.kept)


def part_sizes(length: int, shards: int) -> list[int]:
    """Return how many tokens each rank has: 33 tokens on 2 ranks -> 17, 16."""
    return [length // shards + (rank < length % shards) for rank in range(shards)]
