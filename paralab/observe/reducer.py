"""What DDP itself measures in its first ten passes: compute time, communication time, their
overlap, and the buckets.

The numbers come from a private method of DDP, called only here. If a version of torch lacks it or
renames a number, there is no event. They describe the previous pass and become available when the
next forward begins.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from paralab.observe.rank import Rank

MEASURED_PASSES = 10  # then DDP measures only one in a hundred
SECONDS = 1e-9  # DDP counts nanoseconds


def note_reduction(rank: Rank, model: Any, number: int | None, forwards: int) -> None:
    """Call this after every forward of a wrapped model. It does nothing after the first few."""
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
