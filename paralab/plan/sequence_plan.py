"""Require that a model has blocks that can process split sequences, and describe them."""

from __future__ import annotations

import re
from typing import NamedTuple

from paralab.errors import UsageError
from paralab.plan.plan import Reasons
from paralab.plan.recompute import listed
from paralab.plan.request import Request, splits_sequences
from paralab.units import count, plural
from paralab.workload.sequence_plan import SequencePlan, SplitBlock, part_sizes
from paralab.workload.summary import Summary


def require_blocks(
    request: Request, shards: int, summary: Summary, reasons: Reasons
) -> SequencePlan | None:
    """Return the proved blocks, or raise an error if there are none."""
    if not splits_sequences(request):
        return None
    plan = summary.sequence_plan
    assert plan is not None
    assert plan.shards == shards
    if plan.problem:
        raise UsageError(
            f"cp cannot split the sequences of {summary.name} over {plural(shards, 'shard')}: "
            f"{plan.problem}.",
            fix="a different number of --shards, or tp, ddp, or fsdp",
        )
    because = "a split forward and backward pass in fp64 equals the plain one; "
    because += f"their activations take 1/{shards} of the memory, and everything else is replicated"
    value = f"{len(plan.kept)} of {listed([block.name for block in plan.kept])}"
    if len(plan.kept) == len(plan.blocks):
        value = listed([block.name for block in plan.kept])
    reasons.add("split blocks", value, because)
    sizes = part_sizes(plan.length, shards)
    because = (
        f"{plan.length} tokens in the trial; batches with other lengths are split the same way"
    )
    reasons.add("tokens per rank", " + ".join(map(str, sizes)), because)
    exchanges = 2 * sum(block.attention for block in plan.kept)
    weights = sum(block.parameters for block in plan.kept)
    because = "in each forward pass, and as many in each backward pass: before and after attention"
    because += f"; after the last one, the gradients of {count(weights)} parameters are summed"
    reasons.add("all-to-alls", exchanges, because)
    return plan


def remark_on_sequence(plan: SequencePlan | None) -> tuple[str, ...]:
    """State how many tokens each rank gets, and where. Plans and timings show this remark."""
    if plan is None:
        return ()
    largest = part_sizes(plan.length, plan.shards)[0]
    blocks = f"{len(plan.kept)} of {plural(len(plan.blocks), 'block')}"
    split = f"{plural(largest, 'token')} of {plan.length}"
    return (
        f"cp gives each rank up to {split} in {blocks}; outside, each rank computes everything",
    )


class BlockRow(NamedTuple):
    """Blocks whose rows differ only in the numbers in their names."""

    block: str  # the name, with * for its number
    blocks: int
    kept: bool
    result: str


def block_table(plan: SequencePlan) -> list[BlockRow]:
    kinds: dict[tuple[str, str], list[SplitBlock]] = {}
    for block in plan.blocks:
        verdict = "" if block.kept else block.reason
        kinds.setdefault((re.sub(r"\b\d+\b", "*", block.name), verdict), []).append(block)
    return [
        BlockRow(
            name,
            len(blocks),
            blocks[0].kept,
            verdict or f"equal within {max(block.error or 0.0 for block in blocks):.1g}",
        )
        for (name, verdict), blocks in kinds.items()
    ]
