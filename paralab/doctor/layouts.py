"""The order of a tensor's values in memory."""

from __future__ import annotations

from collections.abc import Sequence


def in_same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Two sets of strides that differ in dimensions of size 1 only: the values lie in the same
    order."""
    return all(mine == its for size, mine, its in zip(shape, one, other, strict=True) if size > 1)
