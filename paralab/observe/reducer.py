"""What DDP itself measures in its first ten passes: compute time, communication time, their
overlap, and the buckets.

A private method of DDP returns these numbers. If a version of torch lacks the method or renames a
number, there is no event. The numbers describe the previous pass and become available when the next
forward begins.
"""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from paralab.observe.rank import Rank

MEASURED_PASSES = 10  # after that, DDP measures only one pass in a hundred
SECONDS = 1e-9  # DDP counts nanoseconds


def note_reduction(rank: Rank, model: Any, number: int | None, forwards: int) -> None:
    """Report DDP's measurements. Call this after every forward; only the first calls report."""
    if forwards > MEASURED_PASSES + 1 or not isinstance(model, DistributedDataParallel):
        return
    measured: dict[str, Any] = getattr(model, "_get_ddp_logging_data", dict)()
    computed = measured.get("backward_compute_time", 0)
    reduced = measured.get("backward_comm_time", 0)
    sizes = measured.get("rebuilt_bucket_sizes") or measured.get("bucket_sizes") or ""
    if not computed or not reduced:
        return
    rank.emit(
        "reduced",
        site=None,
        model=number,
        iteration=measured.get("iteration", 0),
        compute=computed * SECONDS,
        transfer=reduced * SECONDS,
        hidden=measured.get("backward_compute_comm_overlap_time", 0) * SECONDS,
        buckets=[int(size) for size in sizes.split(",") if size.strip().isdigit()],
    )
