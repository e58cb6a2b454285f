"""The plain numbers of context and sequence parallelism: the blocks that process a part of the
sequence, their arguments that are split, and their outputs that are joined."""

from __future__ import annotations

from dataclasses import dataclass

Dims = tuple[tuple[int, int], ...]  # (number of a tensor, its sequence dim)


@dataclass(frozen=True)
class SplitBlock:
    """A block. The numbers of tensors are their positions in the block's arguments or outputs.

    arguments   the numbers of tensor arguments that the proof covers; a mask may be missing
    attention   the number of attention calls, each between two all-to-alls
    parameters  the number of parameters, whose gradients are summed over the ranks
    cut         arguments that are split, so that each rank takes its part
    after       the block whose output, already this rank's part, is the input; empty if none
    parts       the arguments that are outputs of `after`
    gathered    outputs whose parts are joined; empty if the next block takes the parts
    joined      submodules that get the whole sequence, because they contain split layers
    kept        whether the proof passed on all ranks
    error       the largest difference between the split and the plain block, relative to the
                largest value; None if either block failed
    reason      why the block is not kept
    """

    name: str
    arguments: tuple[int, ...] = ()
    attention: int = 0
    parameters: int = 0
    cut: Dims = ()
    after: str = ""
    parts: Dims = ()
    gathered: Dims = ()
    joined: tuple[str, ...] = ()
    kept: bool = False
    error: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class SequencePlan:
    """The blocks of a model for a number of shards. If they cannot be used, `problem` says why.

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
    """Return the number of tokens on each rank: 33 tokens on 2 ranks -> 17, 16."""
    return [length // shards + (rank < length % shards) for rank in range(shards)]
