"""What fsdp gathers, uses and lets go again as one: the units into which a model's parameters are
sharded."""

from __future__ import annotations

import re

from paralab.errors import UsageError
from paralab.machine.host import Machine
from paralab.plan.plan import Reason
from paralab.units import size
from paralab.workload.summary import Summary

BRANCHES = "the ranks take different branches"  # what fsdp cannot train: every rank must use the same units
FSDP_TORCH = (2, 10)  # collectives of one's own, sums instead of means, and gloo's part of it


def needs_units(strategy: str) -> bool:
    """Does this strategy shard parameters, unit by unit?"""
    return strategy == "fsdp"


def shard_units(
    strategy: str, machine: Machine, summary: Summary, reasons: list[Reason]
) -> tuple[str, ...]:
    """What fsdp gathers, uses and lets go again as one."""
    if not needs_units(strategy):
        return ()
    version = tuple(int(number) for number in re.findall(r"\d+", machine.torch)[:2])
    if version < FSDP_TORCH:
        needed = ".".join(map(str, FSDP_TORCH))
        raise UsageError(
            f"fsdp needs PyTorch {needed}; this is {machine.torch}.",
            fix=f"pip install 'torch>={needed}', or use ddp",
        )
    if summary.scalars:
        name = summary.scalars[0]
        raise UsageError(
            f"fsdp cannot shard the parameter {name!r} of {summary.name}: it is one number without a dimension.",
            fix=f"give {name!r} the shape (1,), or use ddp",
        )
    names = tuple(unit.name for unit in summary.units)
    if not names:
        because = "no sub-module that holds a good part of the parameters is called once and keeps them to itself"
        reasons.append(Reason("shard units", "the whole model", because))
        return ()
    held = sum(unit.parameter_bytes for unit in summary.units)
    shown = ", ".join(names[:4]) + (f", … {names[-1]}" if len(names) > 4 else "")
    left = summary.parameter_bytes - held
    rest = f"; {size(left)} stay with the whole model" if left else ""
    because = f"the sub-modules that hold most: {size(held)} of {size(summary.parameter_bytes)} of parameters{rest}"
    reasons.append(Reason("shard units", f"{len(names)}: {shown}", because))
    return names
