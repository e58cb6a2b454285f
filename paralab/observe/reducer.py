"""What DDP itself measures of its first ten passes: how long it computed and reduced, how much of
both at once, in which buckets.

The numbers come from a private part of DDP, read in this one place; a torch that lacks it, or names
a number differently, gives no event. They are those of the pass before, and known when the next
forward begins.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from paralab.observe.rank import Rank

MEASURED_PASSES = 10  # then DDP measures one in a hundred only
SECONDS = 1e-9  # it counts in nanoseconds


def note_reduction(rank: Rank, model: Any, number: int | None, forwards: int) -> None:
    """Called after every forward of a wrapped model; cheap, and silent after the first few."""
    if forwards > MEASURED_PASSES + 1 or not isinstance(model, DistributedDataParallel):
        return
    said: dict[str, Any] = getattr(model, "_get_ddp_logging_data", dict)()
    computed, reduced = said.get("backward_compute_time", 0), said.get("backward_comm_time", 0)
    sizes = said.get("rebuilt_bucket_sizes") or said.get("bucket_sizes") or ""
    if not computed or not reduced:
        return
    rank.emit(
        "reduced",
        site=None,
        model=number,
        iteration=said.get("iteration", 0),
        compute=computed * SECONDS,
        transfer=reduced * SECONDS,
        hidden=said.get("backward_compute_comm_overlap_time", 0) * SECONDS,
        buckets=[int(size) for size in sizes.split(",") if size.strip().isdigit()],
    )
