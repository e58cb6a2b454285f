"""Shard units: the submodules whose parameters fsdp gathers, uses, and frees together."""

from __future__ import annotations

import re

from paralab.errors import UsageError
from paralab.machine.host import Machine
from paralab.plan.plan import Reasons
from paralab.units import size
from paralab.workload.summary import Summary

# fsdp cannot train such a model: all ranks must use the same units.
BRANCHES = "the ranks take different branches"
FSDP_TORCH = (2, 10)  # the first with custom collectives and sums instead of means, both on gloo


def needs_units(strategy: str) -> bool:
    """Return whether this strategy shards the parameters, unit by unit."""
    return strategy == "fsdp"


def shard_units(
    strategy: str, machine: Machine, summary: Summary, reasons: Reasons
) -> tuple[str, ...]:
    """Choose the unit names; parameters outside all units are gathered with the entire model."""
    if not needs_units(strategy):
        return ()
    _require_shardable(machine, summary)

    names = tuple(unit.name for unit in summary.units)
    if not names:
        reasons.add(
            "shard units",
            "the whole model",
            "no submodule has a large share of the parameters, is called only once per forward, "
            "and uses its parameters alone",
        )
        return ()
    held = sum(unit.parameter_bytes for unit in summary.units)
    left = summary.parameter_bytes - held
    shown = ", ".join(names[:4]) + (f", … {names[-1]}" if len(names) > 4 else "")
    because = f"these submodules have {size(held)} of {size(summary.parameter_bytes)} of parameters"
    because += f"; {size(left)} are gathered with the entire model" if left else ""
    reasons.add("shard units", f"{len(names)}: {shown}", because)
    return names


def _require_shardable(machine: Machine, summary: Summary) -> None:
    version = tuple(int(number) for number in re.findall(r"\d+", machine.torch)[:2])
    if version < FSDP_TORCH:
        needed = ".".join(map(str, FSDP_TORCH))
        raise UsageError(
            f"fsdp needs PyTorch {needed} or newer; this is {machine.torch}.",
            fix=f"pip install 'torch>={needed}', or use ddp",
        )
    if summary.scalars:
        name = summary.scalars[0]
        raise UsageError(
            f"fsdp cannot shard the parameter {name!r} of {summary.name}: it is a scalar.",
            fix=f"give {name!r} the shape (1,), or use ddp",
        )
