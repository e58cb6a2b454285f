"""Choose the repeated blocks to recompute in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from paralab.errors import UsageError
from paralab.plan.plan import Reasons, Stage
from paralab.plan.request import PIPELINED, Request
from paralab.units import plural
from paralab.workload.summary import Summary

NO_BLOCKS = (
    "no repeated blocks (submodules that contain submodules and have a sibling with the same class "
    "and parameter shapes)"
)
KEEPS = {
    "full": "only the inputs of each block are kept for the backward pass",
    "selective": "of each block, only the inputs and the outputs of matrix products, convolutions, "
    "and attention are kept for the backward pass",
}


def choose_recomputed(
    request: Request, summary: Summary, stages: Sequence[Stage], reasons: Reasons
) -> tuple[str, ...]:
    """Return the blocks that can be recomputed and that no stage cuts."""
    mode = request.recompute
    if mode is None:
        return ()
    if not summary.blocks:
        raise UsageError(
            f"--recompute {mode}: {summary.name} has {NO_BLOCKS}.",
            fix="leave out --recompute, or group the layers into modules that share a class",
        )
    stateful = [block.name for block in summary.blocks if mode not in block.recomputes]
    threads = request.strategy == "dp" or (request.strategy in PIPELINED and not request.schedule)
    shared = [block.name for block in summary.blocks if threads and block.python_random]
    cut = {b.name for b in summary.blocks for s in stages if s.start.startswith(f"{b.name}.")}
    left_out = {*cut, *stateful, *shared}
    names = [block.name for block in summary.blocks if block.name not in left_out]

    because = KEEPS[mode]
    if stateful:
        because += (
            f"; not {listed(stateful)}: in a trial step, recomputing this failed or gave a "
            "different result (state such as BatchNorm's statistics, a cache, or in-place "
            "operators)"
        )
    if shared:
        because += (
            f"; not {listed(shared)}: it draws from Python's or numpy's generator, which the threads "
            f"of {request.strategy} share"
        )
    if cut:
        because += f"; not {listed(sorted(cut))}: a stage begins inside"
    if not names:
        possible = {way for block in summary.blocks for way in block.recomputes}
        other = "".join(f"--recompute {way}, " for way in sorted(possible))
        raise UsageError(
            f"--recompute {mode} cannot recompute any of the {plural(len(summary.blocks), 'block')} "
            f"of {summary.name}: {because.partition('; ')[2]}.",
            fix=f"{other}leave out --recompute, or turn off what changes in each call (a Hugging "
            "Face model's cache: config.use_cache = False)",
        )
    reasons.add("recompute", f"{mode}: {listed(names)}", because)
    return tuple(names)


def listed(names: Sequence[str]) -> str:
    """Return `12 blocks (blocks.0, blocks.1, blocks.2, … blocks.11)` for twelve names."""
    shown = ", ".join(names[:3]) + (f", … {names[-1]}" if len(names) > 3 else "")
    return f"{len(names)} blocks ({shown})" if len(names) > 1 else shown
