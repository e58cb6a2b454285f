"""Find a way to split layers, sequences, or experts, and prove it. Each rank is a CPU process that
uses gloo.

python -m paralab.worker.proofs.prove_shards ANSWER.json QUESTION.json
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paralab.plan.tensor_groups import attempts, propose, uneven
from paralab.plan.vocabulary_groups import propose_vocabulary
from paralab.worker.inspection.answers import answer
from paralab.worker.proofs.block_proof import (
    Shard,
    Sharded,
    Values,
    first_line,
    prove,
    run_block,
    without_gradient,
)
from paralab.worker.proofs.model_proof import prove_together
from paralab.worker.proofs.proof_model import load_for_proof
from paralab.worker.proofs.prove_experts import find_expert_plan
from paralab.worker.proofs.prove_sequence import find_sequence_plan
from paralab.worker.proofs.prove_tokens import find_token_plan
from paralab.worker.proofs.prove_vocabulary import prove_vocabulary
from paralab.worker.sharding.shard_streams import ShardStreams
from paralab.worker.sharding.sharded_layers import shard_group, watch_regions
from paralab.worker.sharding.split_logits import reading_logits
from paralab.workload.expert_plan import ExpertPlan
from paralab.workload.fp64 import loss_in_fp64
from paralab.workload.linear_layers import (
    Call,
    find_layers,
    integers_around,
    record_calls,
)
from paralab.workload.load import load_workload
from paralab.workload.randomness import seed_everything
from paralab.workload.sequence_plan import SequencePlan
from paralab.workload.split_values import reads_values
from paralab.workload.state import restored
from paralab.workload.tensor_group import LinearLayer, TensorGroup, TensorPlan
from paralab.workload.verify_controls import controlled
from paralab.workload.workload import Workload

READS_VALUES = (
    "the model reads values between its columns and row (such as in an `if`), and these differ "
    "between shards"
)
PATIENCE = timedelta(minutes=5)


def _reply(question: dict[str, Any]) -> dict[str, Any]:
    shards, where = question["shards"], f"file://{Path(sys.argv[1]).with_name('rendezvous')}"
    kind, find = FINDERS[question["what"]]
    try:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", where, PATIENCE, world_size=shards, rank=rank)
        workload = load_workload(question["workload"])
        plan = find(replace(workload, loss=loss_in_fp64(workload.loss)), shards)
    except Exception as error:  # a model that cannot be copied, or that rejects two samples
        traceback.print_exc()
        plan = kind(shards, (), problem=first_line(error))
    return asdict(plan)


def find_tensor_plan(workload: Workload, shards: int) -> TensorPlan:
    """Propose groups, prove each group separately, and then prove all proved groups together."""
    model, inputs, batch, casts = load_for_proof(workload)
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    for parameter in frozen:  # otherwise, the graph would lack frozen layers
        parameter.requires_grad_(True)
    mesh = DeviceMesh("cpu", list(range(shards)))
    kinds = ["batch_norm", *casts]
    with controlled(model, kinds):
        seed_everything(0)
        with restored(model):
            layers, tables, called = find_layers(model, inputs)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        groups: list[TensorGroup] = []
        while True:
            proposed, left = propose(layers, called, groups)
            if not proposed:
                break
            with restored(model):
                calls = record_calls(model, inputs, {group.block for group in proposed})
            by_name = {layer.name: layer for layer in layers}
            groups += _prove_each(model, calls, proposed, by_name, mesh)
        vocabulary, left = propose_vocabulary(tables, layers, left, called, parameters)
        with restored(model):
            calls = record_calls(model, inputs, {n for each in vocabulary for n in each.layers})
        groups += [prove_vocabulary(model, group, calls, mesh) for group in vocabulary]
    plan = TensorPlan(shards, tuple(groups), tuple(left.items()), parameters)
    if not plan.kept:
        return replace(plan, problem=_why_none(plan))
    for parameter in frozen:
        parameter.requires_grad_(False)
    problem = ""
    for attempt in _attempts(plan):
        failure = prove_together(workload, model, batch, _sharder(attempt.kept, mesh), kinds)
        if not attempt.splits_loss:  # gathering the logits may help
            problem = problem or failure or ""
        if not failure:
            return _with_reason(attempt, problem)
    return replace(plan, problem=problem)


def find_tensor_and_token_plan(workload: Workload, shards: int) -> TensorPlan:
    """Also find the blocks that split the tokens between the groups."""
    plan = find_tensor_plan(workload, shards)
    return plan if plan.problem else replace(plan, sequence=find_token_plan(workload, plan))


def _attempts(plan: TensorPlan) -> Iterator[TensorPlan]:
    """Yield plans to try. In the first, the loss reads split logits. The next ones gather the
    logits, and let the model change results in place, which torch's styles do not allow. Then
    repeat this with fewer split embeddings and heads."""
    words = [group for group in plan.kept if group.words]
    out = [(), *((group,) for group in words)] + ([tuple(words)] if len(words) > 1 else [])
    for left in out:
        groups = [replace(g, kept=False) if g in left else g for g in plan.groups]
        if any(group.kept for group in groups):
            heads = [replace(g, split_loss=bool(g.words and g.columns)) for g in groups]
            own = [replace(group, own_style=True) for group in groups]
            for attempt in dict.fromkeys(map(tuple, (heads, groups, own))):
                yield replace(plan, groups=attempt)


def _with_reason(plan: TensorPlan, problem: str) -> TensorPlan:
    """Add the reason to groups that passed the proof alone, but not in the whole model."""
    groups = (
        replace(group, reason=problem) if not (group.kept or group.reason) else group
        for group in plan.groups
    )
    return replace(plan, groups=tuple(groups))


def _sharder(groups: Sequence[TensorGroup], mesh: DeviceMesh) -> Shard:
    """Return a function that shards these groups of a model."""

    def shard(model: nn.Module) -> Sharded:
        for group in groups:
            shard_group(model, group, mesh)

        def draw(streams: ShardStreams) -> None:
            watch_regions(model, groups, streams.enter, streams.leave)

        return Sharded(lambda: reading_logits(groups), draw)

    return shard


def _prove_each(
    model: nn.Module,
    calls: Mapping[str, list[Call]],
    proposed: list[TensorGroup],
    layers: Mapping[str, LinearLayer],
    mesh: DeviceMesh,
) -> list[TensorGroup]:
    worked: dict[Any, TensorGroup] = {}  # kind of block -> the attempt that worked, without names
    failed: set[Any] = set()
    groups = []
    for block, together in groupby(proposed, key=lambda group: group.block):
        plain = model.get_submodule(block)
        reference = run_block(plain, calls[block])
        for group in together:
            around = tuple(integers_around(model, block, group.layers).items())
            tries = list(attempts(group, layers, around, mesh.size()))
            kind = type(plain), _inside(group).layers
            tries.sort(key=lambda each: _inside(each) != worked.get(kind))
            if kind in failed:  # make one attempt to get a reason
                tries = tries[:1]

            best = _first_proved(plain, calls[block], reference, group, tries, mesh)
            if best.kept:
                worked[kind] = _inside(best)
            else:
                failed.add(kind)
                why = uneven(group, layers, around, mesh.size())
                best = replace(best, reason=why or best.reason)
            groups.append(best)
    return groups


def _first_proved(
    plain: nn.Module,
    calls: list[Call],
    reference: Values,
    group: TensorGroup,
    tries: list[TensorGroup],
    mesh: DeviceMesh,
) -> TensorGroup:
    """Return the first attempt that passes the proof, or else the first attempt with its reason."""
    if idle := without_gradient(group, reference):
        return replace(group, reason=f"no gradient reaches {idle}, so a proof would show nothing")
    start = len(f"{group.block}.") if group.block else 0
    columns, row = [name[start:] for name in group.columns], group.row[start:]
    if not group.is_attention and reads_values(plain, calls, columns, row):
        return replace(group, reason=READS_VALUES)
    results: list[TensorGroup] = []
    for attempt in tries:
        results.append(prove(plain, calls, reference, attempt, mesh))
        if results[-1].kept:
            return results[-1]
    return results[0] if results else replace(group, reason="no attempt is possible")


def _inside(group: TensorGroup) -> TensorGroup:
    """Return the group with names relative to its block, for comparison with groups in other
    blocks."""
    start = len(group.block)
    return TensorGroup(
        "",
        tuple(name[start:] for name in group.columns),
        group.row[start:],
        group.weights,
        group.parts,
        tuple((name[start:], value) for name, value in group.divided),
        own_style=group.own_style,
    )


FINDERS: Mapping[str, tuple[Any, Callable[[Workload, int], Any]]] = {
    "tensor": (TensorPlan, find_tensor_plan),
    "token": (TensorPlan, find_tensor_and_token_plan),
    "sequence": (SequencePlan, find_sequence_plan),
    "expert": (ExpertPlan, find_expert_plan),
}


def _why_none(plan: TensorPlan) -> str:
    reasons = [group.reason for group in plan.groups]
    reasons += [f"layer {name!r}: {reason}" for name, reason in plan.left]
    return next(iter(reasons), "it has no linear layers")


main = partial(answer, _reply)

if __name__ == "__main__":
    main()
