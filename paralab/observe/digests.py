"""Two numbers per tensor that tell tensors of different ranks apart: the norm and the sum. And
which steps are worth the cost.

All ranks must look at the same steps, so the step's number alone decides: the first few, then ever
fewer, then one in 64.
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

FIRST = 4
EVERY = 64
DEPTH = 4  # of a batch made of dicts and lists
ROWS = 64  # of a batch, whose rows are told apart one by one
VALUES = 128  # of a row that go into its checksum, spread over the row: images have black borders


def is_sampled(number: int) -> bool:
    """1 2 3 4 8 16 32 64 128 192 …"""
    return number <= FIRST or number % EVERY == 0 or (number < EVERY and number & (number - 1) == 0)


@torch.no_grad()
def of_tensors(tensors: Sequence[torch.Tensor | None]) -> list[list[float] | None]:
    """[norm, sum] of each; None for what is not there. One transfer from the device for all that
    are alike."""
    there = [tensor.detach() for tensor in tensors if tensor is not None]
    if not there:
        return [None] * len(tensors)
    there = [_plain(tensor) for tensor in there]
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in there:
        pair = torch.stack([torch.linalg.vector_norm(tensor), tensor.sum()])
        alike.setdefault((tensor.device, tensor.dtype), []).append(pair)
    moved = {kind: iter(torch.stack(pairs).tolist()) for kind, pairs in alike.items()}
    found = (next(moved[tensor.device, tensor.dtype]) for tensor in there)
    return [
        None if tensor is None else [_finite(value) for value in next(found)] for tensor in tensors
    ]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "to_local"):  # a DTensor: this rank's part
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _finite(value: float) -> float:
    """JSON knows no NaN: a norm below zero stands for one, -2 for infinity."""
    return -1.0 if value != value else -2.0 if value in (float("inf"), float("-inf")) else value


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Of a tensor on the host whose values lie one after another; not through numpy, which a rank
    need not have."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def tensors_in(value: Any, most: int = 4) -> list[torch.Tensor]:
    """The first tensors in nested tuples, lists and dicts."""
    return list(itertools.islice(_tensors_in(value, 0), most))


def _tensors_in(part: Any, depth: int) -> Iterator[torch.Tensor]:
    """Not a function inside another: one that calls itself is a cycle, and would keep the tensors
    until Python looks for cycles. In a forked worker of a DataLoader that ends the worker, because
    freeing pinned memory asks CUDA."""
    if isinstance(part, torch.Tensor):
        yield part
    elif depth <= DEPTH and isinstance(part, (dict, list, tuple)):
        for inner in part.values() if isinstance(part, dict) else part[:8]:
            yield from _tensors_in(inner, depth + 1)


@torch.no_grad()
def of_rows(tensor: torch.Tensor) -> list[int]:
    """A checksum of each row of a batch that lies on the host, of the first few rows."""
    if tensor.device.type != "cpu" or tensor.dim() == 0 or tensor.numel() == 0:
        return []
    rows = tensor.detach()[:ROWS].reshape(min(len(tensor), ROWS), -1)
    rows = rows[:, :: max(1, rows.shape[1] // VALUES)].contiguous()
    size = rows.shape[1] * rows.element_size()
    raw = raw_bytes(rows)
    return [zlib.crc32(raw[start : start + size]) for start in range(0, len(raw), size)]
