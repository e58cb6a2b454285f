"""Find a way to split a workload's sequences within blocks, and prove it. Each rank is a CPU
process that uses gloo."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from paralab.plan.recompute import NO_BLOCKS
from paralab.plan.sequence_splits import ObservedBlock, attempts, chain, unsuitable
from paralab.worker.proofs.block_proof import (
    Shard,
    Sharded,
    Values,
    begin_together,
    compare,
    largest_of,
    run_block,
)
from paralab.worker.proofs.model_proof import prove_together
from paralab.worker.proofs.observe_blocks import observe_blocks
from paralab.worker.proofs.proof_model import load_for_proof
from paralab.worker.sharding.shard_streams import ShardStreams
from paralab.worker.sharding.split_sequence import ArgumentCounts, SplitSequence
from paralab.workload.linear_layers import Call, record_calls
from paralab.workload.randomness import seed_everything
from paralab.workload.repeated_blocks import repeated_blocks
from paralab.workload.sequence_plan import SequencePlan, SplitBlock
from paralab.workload.state import restored
from paralab.workload.verify_controls import controlled
from paralab.workload.workload import Workload


def find_sequence_plan(workload: Workload, shards: int) -> SequencePlan:
    """Prove each block separately, and then all proved blocks together."""
    model, inputs, batch, kinds = load_for_proof(workload)
    with controlled(model, kinds):
        seed_everything(0)
        with restored(model):
            observed = observe_blocks(model, inputs, repeated_blocks(model))
        blocks = _prove_each(model, inputs, observed, shards)
    length = max((size for each in observed for size in each.lengths), default=0)
    plan = SequencePlan(shards, tuple(blocks), length)

    def prove(blocks: Sequence[SplitBlock], seen: ArgumentCounts) -> str | None:
        return prove_together(workload, model, batch, _splitter(blocks, seen), kinds)

    return prove_chained(plan, observed, prove)


def prove_chained(
    plan: SequencePlan,
    observed: Sequence[ObservedBlock],
    prove: Callable[[Sequence[SplitBlock], ArgumentCounts], str | None],
) -> SequencePlan:
    """Prove all kept blocks together. First, let each block pass its parts directly to the next."""
    if not plan.kept:
        reasons = dict.fromkeys(block.reason for block in plan.blocks)
        return replace(plan, problem=next(iter(reasons), f"it has {NO_BLOCKS}"))
    for blocks in dict.fromkeys([tuple(chain(plan.blocks, observed)), plan.blocks]):
        seen: ArgumentCounts = defaultdict(set)
        problem = prove([block for block in blocks if block.kept], seen)
        proved = (
            replace(each, arguments=tuple(sorted({*each.arguments, *seen[each.name]})))
            for each in blocks
        )
        plan = replace(plan, blocks=tuple(proved), problem=problem)
        if problem is None:
            break
    return plan


def prove_block(
    block: SplitBlock, plain: nn.Module, calls: Sequence[Call], reference: Values, shard: Shard
) -> SplitBlock:
    """Return the block with the result of its proof."""
    problem, errors = compare(plain, calls, reference, shard)
    weights = sum(parameter.numel() for parameter in plain.parameters())
    proved = replace(block, kept=problem is None, error=largest_of(errors))
    return replace(proved, reason=problem or "", parameters=weights)


def _splitter(blocks: Sequence[SplitBlock], seen: ArgumentCounts | None = None) -> Shard:
    def shard(model: nn.Module) -> Sharded:
        split = SplitSequence(model, tuple(blocks), None, begin_together, begin_together)
        split.seen = seen

        def draw(streams: ShardStreams) -> None:
            split.streams = streams

        return Sharded(split.training, draw)

    return shard


def _prove_each(
    model: nn.Module, inputs: Any, observed: list[ObservedBlock], shards: int
) -> list[SplitBlock]:
    suitable = [seen.name for seen in observed if not unsuitable(seen, shards)]
    with restored(model):
        calls = record_calls(model, inputs, suitable)
    worked: dict[type, Any] = {}  # split dims that worked in a block of this class
    blocks = []
    for seen in observed:
        if reason := unsuitable(seen, shards):
            blocks.append(SplitBlock(seen.name, reason=reason))
            continue
        plain = model.get_submodule(seen.name)
        tries = sorted(attempts(seen), key=lambda each: each.cut != worked.get(type(plain)))
        results = []
        reference = run_block(plain, calls[seen.name])
        for attempt in tries:
            alone = _splitter([replace(attempt, name="")])
            results.append(prove_block(attempt, plain, calls[seen.name], reference, alone))
            if results[-1].kept:
                worked[type(plain)] = attempt.cut
                break
        none = SplitBlock(seen.name, reason="none of its arguments has the length of the sequence")
        blocks.append(next((each for each in results if each.kept), (results or [none])[0]))
    return blocks
