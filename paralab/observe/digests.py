"""Digests: the norm and sum of a tensor, which the checks compare between ranks.

All ranks must compute digests in the same steps, so the choice depends only on the step number. It
includes the first few steps, then fewer, then one in 64.
"""

import ctypes
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

FIRST = 4
EVERY = 64
DEPTH = 4  # levels of nested dicts and lists in a batch
ROWS = 64  # rows per batch that get a checksum
VALUES = 128  # values per row, spread over the row, because images have black borders


def is_sampled(number: int) -> bool:
    """Return whether to sample this step: 1 2 3 4 8 16 32 64 128 192 …"""
    return number <= FIRST or number % EVERY == 0 or (number < EVERY and number & (number - 1) == 0)


@torch.no_grad()
def of_tensors(tensors: Sequence[torch.Tensor | None]) -> list[list[float] | None]:
    """Return [norm, sum] of each tensor, and None for None. Tensors with the same device and dtype
    share one transfer."""
    there = [_plain(tensor.detach()) for tensor in tensors if tensor is not None]
    if not there:
        return [None] * len(tensors)
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in there:
        pair = torch.stack([torch.linalg.vector_norm(tensor), tensor.sum()])
        alike.setdefault((tensor.device, tensor.dtype), []).append(pair)
    moved = {kind: iter(torch.stack(pairs).tolist()) for kind, pairs in alike.items()}
    rows = (next(moved[tensor.device, tensor.dtype]) for tensor in there)
    return [
        None if tensor is None else [_finite(value) for value in next(rows)] for tensor in tensors
    ]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "to_local"):  # for a DTensor, use this rank's part
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _finite(value: float) -> float:
    """Replace NaN with -1 and infinity with -2, because JSON has neither."""
    return -1.0 if value != value else -2.0 if value in (float("inf"), float("-inf")) else value


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous CPU tensor without numpy, which may be missing."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def first_tensor(value: Any) -> torch.Tensor | None:
    return next(_tensors_in(value, 0), None)


def size_of(value: Any) -> int | None:
    """Return the number of samples: the first dimension of the first tensor."""
    tensor = first_tensor(value)
    return tensor.shape[0] if tensor is not None and tensor.dim() else None


def _tensors_in(part: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yield tensors. Do not nest this in `first_tensor`: a recursive closure is a reference cycle,
    which keeps the tensors alive until the garbage collector runs. It may run in a forked
    DataLoader worker, where freeing pinned memory fails because it needs CUDA."""
    if isinstance(part, torch.Tensor):
        yield part
    elif depth <= DEPTH and isinstance(part, (dict, list, tuple)):
        for inner in part.values() if isinstance(part, dict) else part[:8]:
            yield from _tensors_in(inner, depth + 1)


@torch.no_grad()
def of_rows(tensor: torch.Tensor) -> list[int]:
    """Return a checksum of each of the first rows of a batch in CPU memory."""
    if tensor.device.type != "cpu" or tensor.dim() == 0 or tensor.numel() == 0:
        return []
    rows = tensor.detach()[:ROWS].reshape(min(len(tensor), ROWS), -1)
    rows = rows[:, :: max(1, rows.shape[1] // VALUES)].contiguous()
    size = rows.shape[1] * rows.element_size()
    raw = raw_bytes(rows)
    return [zlib.crc32(raw[start : start + size]) for start in range(0, len(raw), size)]
