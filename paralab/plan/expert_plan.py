"""Require that a model has experts that can be divided among ranks, and describe them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from paralab.errors import UsageError
from paralab.plan.plan import Reasons
from paralab.plan.recompute import listed
from paralab.plan.request import Request, splits_experts
from paralab.units import count, plural
from paralab.workload.expert_plan import ExpertLayer, ExpertPlan
from paralab.workload.summary import Summary

NO_LAYERS = (
    "it has no expert layer: a module that takes tokens, their chosen experts, and weights, and "
    "whose parameters all have the experts along dim 0"
)
NOT_ADDITIVE = (
    "even with all experts on each rank, the parts of a batch do not add up to the whole batch, "
    "for example because of a load-balancing loss or an expert capacity"
)
FIXES = {
    NO_LAYERS: "--workload moe, one such module for all experts of a layer, or ddp or fsdp",
    NOT_ADDITIVE: "a gate and a loss that treat each token on its own, and no random numbers except "
    "for dropout",
}


def uneven(name: str, experts: int, shards: int) -> str | None:
    """Return why these experts cannot be divided, or None. Each rank must get the same number."""
    if experts % shards == 0:
        return None
    divisors = [number for number in range(2, experts + 1) if experts % number == 0]
    return (
        f"the {experts} experts of {name} cannot be divided among {plural(shards, 'shard')}, but "
        f"can be divided among {' or '.join(map(str, divisors))}"
    )


def without_proof(experts: Mapping[str, int], shards: int) -> ExpertPlan | None:
    """Return the plan if no layer can be divided: with nothing to prove, no rank needs to start."""
    layers = tuple(
        ExpertLayer(name, number, reason=uneven(name, number, shards) or "")
        for name, number in experts.items()
    )
    plan = ExpertPlan(shards, layers)
    if plan.kept:
        return None
    problem = next((layer.reason for layer in layers), NO_LAYERS)
    return ExpertPlan(shards, layers, problem)


def require_experts(
    request: Request, shards: int, summary: Summary, reasons: Reasons
) -> ExpertPlan | None:
    """Return the proved layers, or raise an error if there are none."""
    if not splits_experts(request):
        return None
    plan = summary.expert_plan
    assert plan is not None
    assert plan.shards == shards
    if plan.problem:
        other = "a different number of --shards, or ddp or fsdp"
        raise UsageError(
            f"ep cannot divide the experts of {summary.name} among {plural(shards, 'shard')}: "
            f"{plan.problem}.",
            fix=next((fix for why, fix in FIXES.items() if why in plan.problem), other),
        )
    kept = plan.kept
    weights = sum(layer.parameters for layer in kept)
    because = "a step in fp64 equals a plain step; "
    because += f"each rank has 1/{shards} of their {count(weights)} parameters"
    reasons.add("divided layers", listed([layer.name for layer in kept]), because)
    own = " + ".join([str(kept[0].experts // shards)] * shards)
    because = f"of {kept[0].experts}; each token uses {max(layer.chosen for layer in kept)}"
    reasons.add("experts per rank", own, because)
    exchanges = f"{3 * len(kept)} forward, {2 * len(kept)} backward"
    because = "per accumulation step: in each layer, the numbers of tokens, the tokens, and their "
    because += "results; backward, the gradients of both"
    reasons.add("all-to-alls", exchanges, because)
    return plan


def remark_on_experts(plan: ExpertPlan | None) -> tuple[str, ...]:
    """State which layers divide their experts. Plans and timings show this remark."""
    if plan is None:
        return ()
    layers = f"{len(plan.kept)} of {plural(len(plan.layers), 'layer')} with experts"
    return (f"ep gives each rank 1/{plan.shards} of the experts in {layers}",)


class LayerRow(NamedTuple):
    """Layers whose rows differ only in the numbers in their names."""

    layer: str  # the name, with * for its number
    layers: int
    experts: int
    divided: bool
    result: str


def layer_table(plan: ExpertPlan) -> list[LayerRow]:
    kinds: dict[tuple[str, int, str], list[ExpertLayer]] = {}
    for layer in plan.layers:
        name = re.sub(r"\b\d+\b", "*", layer.name)
        kinds.setdefault((name, layer.experts, layer.reason), []).append(layer)
    return [
        LayerRow(name, len(layers), experts, not reason, reason or "equal within 1e-10")
        for (name, experts, reason), layers in kinds.items()
    ]
