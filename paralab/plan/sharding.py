"""What fsdp shards, over which ranks, and in which units. A unit is a submodule whose parameters
are gathered and freed together.

With 4 replicas, and 2 shard groups (HSDP), each parameter has 2 shards. An all-reduce sums the
gradients of equal shards:

    group 0    rank 0: shard 0    rank 1: shard 1
    group 1    rank 2: shard 0    rank 3: shard 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from paralab.errors import UsageError
from paralab.plan.plan import Reasons, Stage
from paralab.plan.request import Request
from paralab.units import plural, size
from paralab.workload.summary import Summary

KEEPS = {
    1: "each rank has optimizer state for some of the parameters, and all gradients and parameters",
    2: "each rank has shards, and keeps gathered parameters from the forward to the backward pass",
    3: "each rank has shards, and gathers parameters again for the backward pass",
}

# fsdp cannot train a model whose ranks use different units.
BRANCHES = "the ranks take different branches"
MIXED_DTYPES = "FSDP needs parameters of one dtype in each unit"
NOT_ON_SHARDS = "torch cannot run this optimizer's step on shards of parameters"


def choose_zero(request: Request, reasons: Reasons) -> int | None:
    """Choose the ZeRO stage (1, 2, or 3), which determines what is sharded."""
    zero = request.zero or (3 if request.strategy == "fsdp" else None)
    if zero is None:
        return None
    because = KEEPS[zero] + ("" if request.zero else "; the least memory")
    reasons.add("ZeRO stage", zero, because)
    return zero


def count_shard_groups(request: Request, replicas: int, reasons: Reasons) -> int:
    """Return the number of shard groups. Each needs at least two replicas."""
    groups = request.shard_groups or 1
    if groups == 1:
        return 1
    shards, left = divmod(replicas, groups)
    if left or shards < 2:
        even = f"--replicas {max(2, -(-replicas // groups)) * groups}"
        divisors = [n for n in range(2, replicas // 2 + 1) if replicas % n == 0]
        other = "".join(f", --shard-groups {n}" for n in divisors[-1:])
        raise UsageError(
            f"--shard-groups {groups} does not fit {plural(replicas, 'replica')}: {replicas} ÷ "
            f"{groups} = {replicas / groups:.3g}, but each group needs the same number of ranks, at "
            "least 2.",
            fix=f"{even}{other}, or ddp, which does not shard",
        )
    because = f"requested; {plural(shards, 'shard')} in each group, all-reduced between groups"
    reasons.add("shard groups", groups, because)
    return groups


def owners(parameters: Sequence[tuple[int | None, int]], ranks: int) -> list[int]:
    """Return the rank that updates each parameter with ZeRO-1. Parameters are (group, elements).

    torch's ZeroRedundancyOptimizer goes through the optimizer's groups. In each, it gives the next
    largest parameter to the rank that has the fewest elements:

        one group, 2 ranks    elements 1 5 3 4
        largest first                    5 to rank 0, 4 to rank 1, 3 to rank 1, 1 to rank 0
    """
    sizes, result = [0] * ranks, [0] * len(parameters)
    groups = [-1 if group is None else group for group, _ in parameters]
    for at in sorted(range(len(parameters)), key=lambda at: (groups[at], -parameters[at][1])):
        if parameters[at][0] is not None:
            result[at] = sizes.index(min(sizes))
            sizes[result[at]] += parameters[at][1]
    return result


def is_in(module: str, unit: str) -> bool:
    return f"{module}.".startswith(f"{unit}.")


def units_in(part: Stage, units: Iterable[str]) -> list[str]:
    """Return the units in this part of the model."""
    return [unit for unit in units if any(is_in(module, unit) for module in part.modules)]


def shard_units(
    zero: int | None, summary: Summary, parts: Sequence[Stage], reasons: Reasons
) -> tuple[str, ...]:
    """Choose the units. Parameters outside all units are gathered together. If the model is cut
    into parts, no cut is inside a unit."""
    if zero not in (2, 3):
        return ()

    places = Counter(name for part in parts for name in units_in(part, _names(summary)))
    cut = {
        unit for unit in places for part in parts if part.start != unit and is_in(part.start, unit)
    }
    names = tuple(n for n in _names(summary) if not parts or (places[n] == 1 and n not in cut))
    if not names:
        reasons.add(
            "shard units",
            "the whole model",
            "no submodule has a large share of the parameters, runs only once per forward pass, "
            "and is the only user of its parameters",
        )
        return ()
    in_units = sum(unit.parameter_bytes for unit in summary.units if unit.name in names)
    left = summary.parameter_bytes - in_units
    shown = ", ".join(names[:4]) + (f", … {names[-1]}" if len(names) > 4 else "")
    total = size(summary.parameter_bytes)
    because = f"they contain {size(in_units)} of the model's {total} of parameters"
    because += f"; the other {size(left)} are gathered together" if left else ""
    reasons.add("shard units", f"{len(names)}: {shown}", because)
    return names


def _names(summary: Summary) -> list[str]:
    return [unit.name for unit in summary.units]
