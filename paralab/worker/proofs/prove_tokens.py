"""Find the blocks in which the shards of split layers can also split the tokens, and prove it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paralab.plan.sequence_splits import ObservedBlock, too_short
from paralab.plan.tensor_groups import enclosing
from paralab.worker.proofs.block_proof import Shard, Sharded, begin_together, run_block
from paralab.worker.proofs.model_proof import prove_together
from paralab.worker.proofs.observe_blocks import observe_blocks
from paralab.worker.proofs.proof_model import load_for_proof
from paralab.worker.proofs.prove_sequence import prove_block, prove_chained
from paralab.worker.sharding.shard_streams import ShardStreams
from paralab.worker.sharding.sharded_layers import watch_regions
from paralab.worker.sharding.split_logits import reading_logits
from paralab.worker.sharding.split_sequence import ArgumentCounts, SplitSequence
from paralab.worker.sharding.split_tokens import contains, shard_groups
from paralab.workload.linear_layers import find_layers, record_calls
from paralab.workload.randomness import seed_everything
from paralab.workload.repeated_blocks import repeated_blocks
from paralab.workload.sequence_plan import SequencePlan, SplitBlock
from paralab.workload.state import restored
from paralab.workload.tensor_group import TensorGroup, TensorPlan
from paralab.workload.verify_controls import controlled
from paralab.workload.workload import Workload


def find_token_plan(workload: Workload, plan: TensorPlan) -> SequencePlan:
    """Prove each block separately, and then all proved blocks together."""
    # Do not hold BatchNorm fixed: it would see only this shard's tokens.
    model, inputs, batch, kinds = load_for_proof(workload)
    mesh = DeviceMesh("cpu", list(range(plan.shards)))
    with controlled(model, kinds):
        seed_everything(0)
        with restored(model):
            called = set(find_layers(model, inputs).called)
        with restored(model):
            observed = observe_blocks(model, inputs, repeated_blocks(model))
        blocks = [_propose(seen, plan, called) for seen in observed]
        with restored(model):
            calls = record_calls(model, inputs, {each.name for each in blocks if not each.reason})
        for number, block in enumerate(blocks):
            if block.reason:
                continue
            plain = model.get_submodule(block.name)
            groups = [_within(group, block) for group in plan.kept if contains(block, group)]
            shard = _sharder(groups, [replace(block, name="")], mesh)
            reference = run_block(plain, calls[block.name])
            proved = prove_block(block, plain, calls[block.name], reference, shard)
            if not proved.kept:
                proved = replace(proved, reason=f"with a part of the tokens, {proved.reason}")
            blocks[number] = proved

    length = max((_tokens(seen) for seen in observed), default=0)
    found = SequencePlan(plan.shards, tuple(blocks), length)

    def prove(blocks: Sequence[SplitBlock], seen: ArgumentCounts) -> str | None:
        shard = _sharder(plan.kept, blocks, mesh, seen)
        return prove_together(workload, model, batch, shard, kinds)

    return prove_chained(found, observed, prove)


def _tokens(seen: ObservedBlock) -> int:
    return seen.arguments[0][-2] if seen.arguments and len(seen.arguments[0]) > 2 else 0


def _propose(seen: ObservedBlock, plan: TensorPlan, called: set[str]) -> SplitBlock:
    """Split the tokens of the first argument. The module that contains a group's columns gets the
    whole sequence. If that module is the block itself, the columns get it."""
    block = SplitBlock(seen.name, (len(seen.arguments),))
    groups = [group for group in plan.kept if contains(block, group)]
    columns = [name for group in groups for name in group.columns]
    length = _tokens(seen)
    if not groups:
        return replace(block, reason="it has no split layers")
    if seen.draws:
        return replace(block, reason="it uses random numbers outside dropout")
    if not length or not seen.floating[0]:
        return replace(block, reason="its first argument has no dim for tokens")
    if reason := too_short(length, plan.shards):
        return replace(block, reason=reason)
    if any(not name.startswith(f"{seen.name}.") for name in columns):
        return replace(block, reason="one of its rows reads columns of another block")
    dim, start = len(seen.arguments[0]) - 2, f"{seen.name}."
    joined: list[str] = []
    for group in groups:
        around = enclosing(group.columns, called)
        joined += [around] if around.startswith(start) else group.columns
    gathered = tuple(
        (number, dim)
        for number, shape in enumerate(seen.outputs)
        if len(shape) == dim + 2 and shape[dim] == length
    )
    names = tuple(dict.fromkeys(name.removeprefix(start) for name in joined))
    return replace(block, cut=((0, dim),), gathered=gathered, joined=names)


def _within(group: TensorGroup, block: SplitBlock) -> TensorGroup:
    """Return the group with names relative to the block."""
    start = f"{block.name}."
    return replace(
        group,
        columns=tuple(name.removeprefix(start) for name in group.columns),
        row=group.row.removeprefix(start),
        divided=tuple((name.removeprefix(start), value) for name, value in group.divided),
        summed=tuple(name.removeprefix(start) for name in group.summed),
    )


def _sharder(
    groups: Sequence[TensorGroup],
    blocks: Sequence[SplitBlock],
    mesh: DeviceMesh,
    seen: ArgumentCounts | None = None,
) -> Shard:
    """Return a function that shards these groups of a model, and splits the tokens in blocks."""

    def shard(model: nn.Module) -> Sharded:
        sequence = SplitSequence(model, tuple(blocks), None, begin_together, begin_together)
        sequence.seen = seen
        shard_groups(model, groups, mesh, sequence)

        def draw(streams: ShardStreams) -> None:
            sequence.streams = streams
            watch_regions(model, groups, streams.enter, streams.leave)

        @contextmanager
        def training() -> Iterator[None]:
            with reading_logits(groups):
                yield
            sequence.sum_gradients()

        return Sharded(training, draw)

    return shard
