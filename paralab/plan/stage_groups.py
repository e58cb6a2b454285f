"""Choose the groups of split layers that stage cuts allow. These functions use plain numbers only.

A stage runs in its own processes, so all layers of a group must be in one part of the model:

    layers   embed  fc1  fc2  fc1  fc2  head        groups fc1 ─► fc2
    merged   embed  fc1 + fc2  fc1 + fc2  head      the cuts keep both groups together

With as many parts as layers, nothing can be merged, so a group that a cut divides is not split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from paralab.plan.plan import Stage
from paralab.workload.summary import Layer
from paralab.workload.tensor_group import TensorGroup, TensorPlan


def keep_together(
    layers: Sequence[Layer], plan: TensorPlan | None, parts: int
) -> tuple[Layer, ...]:
    """Merge layers so that no cut divides a group of the plan, as long as at least `parts` layers
    remain."""
    merged = list(layers)
    for group in plan.kept if plan else ():
        places = [n for n, layer in enumerate(merged) if _uses(group, layer.modules)]
        if not places:
            continue
        first, last = places[0], places[-1]
        if len(merged) - (last - first) >= parts:
            merged[first : last + 1] = [_merge(merged[first : last + 1])]
    return tuple(merged)


def _merge(layers: Sequence[Layer]) -> Layer:
    activations = [layer.activation_bytes_per_sample for layer in layers]
    flops = [layer.flops for layer in layers]
    return Layer(
        layers[0].name,
        tuple(name for layer in layers for name in layer.modules),
        sum(layer.seconds for layer in layers),
        sum(layer.parameter_bytes for layer in layers),
        None if None in activations else sum(each or 0.0 for each in activations),
        None if None in flops else sum(each or 0.0 for each in flops),
    )


def leave_cut_groups(plan: TensorPlan, parts: Sequence[Stage]) -> TensorPlan:
    """Do not split groups whose layers are in multiple parts of the model."""
    left: dict[TensorGroup, str] = {}
    for group in plan.kept:
        used = [number for number, part in enumerate(parts) if _uses(group, part.modules)]
        if len(used) > 1:
            start, (first, *_, last) = parts[used[1]].start, group.layers
            left[group] = f"the model is cut at {start!r}, between {first} and {last}"
    return _leave(plan, left)


def leave_fused_groups(plan: TensorPlan) -> TensorPlan:
    """Do not split groups with multiple matrices side by side, because FSDP cannot shard them."""
    why = "FSDP cannot shard a layer again if its shard is in multiple pieces"
    return _leave(plan, {group: why for group in plan.kept if group.in_pieces})


def gather_logits(plan: TensorPlan) -> TensorPlan:
    """Do not let the loss read split logits, which stages and FSDP cannot pass on."""
    groups = tuple(replace(group, split_loss=False) for group in plan.groups)
    return replace(plan, groups=groups)


def _leave(plan: TensorPlan, left: dict[TensorGroup, str]) -> TensorPlan:
    # Groups that divide the same attribute (such as a number of heads) must be split together.
    why = "it divides the same attribute (such as a number of heads) as a group that stays whole"
    while further := [g for g in plan.kept if g not in left and _divided(g) & _divided(*left)]:
        left |= dict.fromkeys(further, why)
    groups = (
        replace(group, kept=False, reason=left[group]) if group in left else group
        for group in plan.groups
    )
    return replace(plan, groups=tuple(groups))


def part_of(group: TensorGroup, parts: Sequence[Stage]) -> int:
    """Return the number of the model part that has the group's layers."""
    return next(number for number, part in enumerate(parts) if _uses(group, part.modules))


def _divided(*groups: TensorGroup) -> set[str]:
    return {path for group in groups for path, _ in group.divided}


def _uses(group: TensorGroup, modules: Iterable[str]) -> bool:
    """Return whether `modules` contain the group's layers or read its divided numbers."""
    owners = {path.rpartition(".")[0] for path, _ in group.divided}
    summed = {path.rpartition(".")[0] for path in group.summed}
    within = tuple(f"{name}." if name else "" for name in {*group.layers, *owners})
    names = {*group.layers, *owners, *summed}
    return any(module in names or module.startswith(within) for module in modules)
