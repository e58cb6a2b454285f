"""Require that a model has layers that tensor parallelism can split, and describe them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from paralab.errors import UsageError
from paralab.plan.plan import Reasons, Stage
from paralab.plan.recompute import listed
from paralab.plan.request import Request, splits_layers
from paralab.plan.stage_groups import gather_logits, leave_cut_groups, leave_fused_groups
from paralab.units import count, plural
from paralab.workload.summary import Summary
from paralab.workload.tensor_group import TensorGroup, TensorPlan


def remark_on(plan: TensorPlan | None) -> tuple[str, ...]:
    """State what share of the parameters is split. Plans and timings show this remark."""
    if plan is None:
        return ()
    groups = f"{len(plan.kept)} of {plural(len(plan.groups), 'group')} of layers"
    rest = "each shard has all of the rest"
    split = (f"the shards split {plan.share:.0%} of the parameters ({groups}); {rest}",)
    if plan.sequence is None:
        return split
    blocks = f"{len(plan.sequence.kept)} of {plural(len(plan.sequence.blocks), 'block')}"
    return (*split, f"between split layers, the shards split the tokens in {blocks}")


# The modules that define the names in `parallelize_code`.
SOURCES = {
    "paralab.worker.sharding.sharded_attention": {"MultiheadParallel"},
    "paralab.worker.sharding.sharded_embedding": {"EmbeddingParallel"},
    "paralab.worker.sharding.sharded_layers": {"MatrixParallel"},
    "torch.distributed._functional_collectives": {"all_reduce"},
    "torch.distributed.tensor": {"Replicate"},
    "torch.distributed.tensor.experimental": {"implicit_replication"},
    "torch.distributed.tensor.parallel": {
        "ColwiseParallel",
        "RowwiseParallel",
        "loss_parallel",
        "parallelize_module",
    },
}


def require_groups(
    request: Request, shards: int, parts: Sequence[Stage], summary: Summary, reasons: Reasons
) -> TensorPlan | None:
    """Return the proved groups, or raise an error if there are none. A group stays whole if a
    stage cut divides it, or if FSDP cannot shard it over the replicas."""
    if not splits_layers(request):
        return None
    plan = summary.tensor_plan
    assert plan is not None
    assert plan.shards == shards
    if not plan.problem:
        plan = leave_cut_groups(plan, parts)
        plan = leave_fused_groups(plan) if request.zero in (2, 3) else plan
        plan = gather_logits(plan) if request.zero or len(parts) > 1 else plan
    if not plan.problem and not plan.kept:
        plan = replace(plan, problem=next(group.reason for group in plan.groups))
    if plan.problem:
        raise UsageError(
            f"{request.strategy} cannot split {summary.name} over {plural(shards, 'shard')}: "
            f"{plan.problem}.",
            fix="a different number of --shards, or ddp or fsdp",
        )
    if request.sequence_parallel and (plan.sequence is None or plan.sequence.problem):
        problem = plan.sequence.problem if plan.sequence else "it has no proved blocks"
        raise UsageError(
            f"--sequence-parallel cannot split the tokens of {summary.name} over "
            f"{plural(shards, 'shard')}: {problem}.",
            fix="leave out --sequence-parallel",
        )
    split = sum(group.weights for group in plan.kept)
    because = f"they have {count(split)} of {count(plan.parameters)} parameters, and a sharded "
    because += "forward and backward pass in fp64 equals the plain one; the rest is replicated"
    value = f"{len(plan.kept)} of {plural(len(plan.groups), 'group')} ({plan.share:.0%})"
    reasons.add("split layers", value, because)
    if plan.sequence:
        names = listed([block.name for block in plan.sequence.kept])
        because = "requested; norms, dropout, and residuals see only this shard's tokens, which is "
        because += "proved in the same way"
        reasons.add("split tokens", names, because)
    return plan


def parallelize_code(plan: TensorPlan) -> list[str]:
    """Return Python code that applies the plan to the user's model, on a `mesh` of the shards."""
    styles = {layer: group.style_of(layer) for group in plan.kept for layer in group.layers}
    summed = dict.fromkeys(name for group in plan.kept for name in group.summed)
    used = {style.partition("(")[0] for style in styles.values()} | {"parallelize_module"}
    used |= {"all_reduce"} if summed else set()
    used |= {"Replicate"} if any("Replicate" in style for style in styles.values()) else set()
    used |= {"implicit_replication", "loss_parallel"} if plan.splits_loss else set()
    tied = [(path, f"{group.row}.weight") for group in plan.kept for path in group.tied]
    lines = []
    for module, names in SOURCES.items():
        if needed := sorted(used & names):
            lines.append(f"from {module} import {', '.join(needed)}")

    for path, value in dict(each for group in plan.kept for each in group.divided).items():
        owner, _, name = path.rpartition(".")
        module = f'model.get_submodule("{owner}")' if owner else "model"
        lines.append(f"{module}.{name} = {value}")
    for path in summed:
        hook = 'lambda grad: all_reduce(grad, "sum", mesh)'
        lines.append(f'model.get_parameter("{path}").register_hook({hook})')
    lines += ["parallelize_module(model, mesh, {"]
    lines += [f'    "{layer}": {style},' for layer, style in styles.items()]
    lines.append("})")
    for path, weight in tied:
        owner, _, name = path.rpartition(".")
        lines.append(f'model.get_submodule("{owner}").{name} = model.get_parameter("{weight}")')
    if plan.splits_loss:
        lines.append("# The loss reads split logits. Compute it and its gradients in this context:")
        lines.append("# with loss_parallel(), implicit_replication():")
    if plan.sequence:
        lines.append("# This code does not split the tokens.")
    return lines


class GroupRow(NamedTuple):
    """Groups whose rows differ only in the numbers in their layers' names."""

    block: str  # the name, with * for its number
    columns: str
    row: str
    groups: int
    parameters: int
    kept: bool
    result: str


def _short(group: TensorGroup, layer: str) -> str:
    return layer.removeprefix(f"{group.block}.")


def table_of(plan: TensorPlan) -> list[GroupRow]:
    """Return one row per kind of group, in the model's order."""
    kinds: dict[tuple[str, ...], list[TensorGroup]] = {}
    for group in plan.groups:
        rows = ", ".join(_short(group, name) for name in (group.row, *group.more_rows))
        short = [*(_short(group, name) for name in group.columns), rows]
        verdict = "" if group.kept else group.reason
        loss = "; the loss reads split logits" * group.split_loss
        key = (re.sub(r"\b\d+\b", "*", group.block), *short, str(group.parts), loss, verdict)
        kinds.setdefault(key, []).append(group)
    return [
        GroupRow(
            block or "the model",
            ", ".join(names) + (f" ({parts} matrices side by side)" if parts != "1" else ""),
            row,
            len(groups),
            sum(group.weights for group in groups),
            groups[0].kept,
            verdict or f"equal within {max(group.error or 0.0 for group in groups):.1g}{loss}",
        )
        for (block, *names, row, parts, loss, verdict), groups in kinds.items()
    ]
