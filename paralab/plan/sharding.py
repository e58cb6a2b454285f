"""Shard units: the submodules whose parameters fsdp gathers, uses, and frees together."""

from __future__ import annotations

from paralab.plan.plan import Reasons
from paralab.plan.request import SHARDED
from paralab.units import size
from paralab.workload.summary import Summary

# fsdp cannot train such a model: all ranks must use the same units.
BRANCHES = "the ranks take different branches"


def shard_units(strategy: str, summary: Summary, reasons: Reasons) -> tuple[str, ...]:
    """Choose the units. Parameters outside all units are gathered together."""
    if strategy not in SHARDED:
        return ()

    names = tuple(unit.name for unit in summary.units)
    if not names:
        reasons.add(
            "shard units",
            "the whole model",
            "no submodule has a large share of the parameters, runs only once per forward pass, "
            "and is the only user of its parameters",
        )
        return ()
    in_units = sum(unit.parameter_bytes for unit in summary.units)
    left = summary.parameter_bytes - in_units
    shown = ", ".join(names[:4]) + (f", … {names[-1]}" if len(names) > 4 else "")
    total = size(summary.parameter_bytes)
    because = f"they contain {size(in_units)} of the model's {total} of parameters"
    because += f"; the other {size(left)} are gathered together" if left else ""
    reasons.add("shard units", f"{len(names)}: {shown}", because)
    return names
