"""What is inside DDP: its measurements in the first ten passes (compute time, communication time,
their overlap, the buckets), and memory layouts. Buckets have the strides that the parameters had
when DDP wrapped them, and a gradient with different strides must be copied.

A private method of DDP returns these numbers. If a version of torch lacks the method or renames a
number, there is no event. The numbers describe the previous pass and become available when the next
forward begins.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paralab.observe.rank import Rank

MEASURED_PASSES = 10  # after that, DDP measures only one pass in a hundred
SECONDS = 1e-9  # DDP counts nanoseconds
MOST_LAYOUTS = 20  # number of gradients to report


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


def strides_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the strides of each parameter, skipping those with gaps or overlaps: their buckets
    have different strides."""
    return {name: p.stride() for name, p in module.named_parameters() if _is_dense(p)}


def _is_dense(parameter: torch.Tensor) -> bool:
    last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return last or parameter.is_contiguous()


def find_stride_mismatches(
    module: nn.Module, wrapped: dict[str, tuple[int, ...]]
) -> list[list[Any]]:
    """Return [name, shape, gradient strides, bucket strides] for each gradient whose strides differ
    from its bucket's."""
    mismatches: list[list[Any]] = []
    for name, parameter in module.named_parameters():
        gradient, strides = parameter.grad, wrapped.get(name)
        if gradient is None or strides is None or gradient.is_sparse:
            continue
        if gradient.stride() != strides:
            mismatches.append([name, list(parameter.shape), list(gradient.stride()), list(strides)])
    return mismatches[:MOST_LAYOUTS]
