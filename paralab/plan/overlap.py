"""Compute how much of DDP's communication is hidden behind the backward pass. These are pure
functions on plain numbers.

Gradients become ready evenly over the backward pass, and buckets are reduced one at a time:

    backward   [·················]            4 buckets, each of which takes 3 · on the link
    bucket 0       [···]
    bucket 1            [···]                 each starts when it is ready and the link is free
    bucket 2                [···]
    bucket 3                    [···]         only the end of the last one is exposed

Large buckets start late and leave a long exposed end. Small buckets pay the latency many times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Transfer(NamedTuple):
    """A bucket's all-reduce. Times are seconds after the start of the backward pass."""

    bytes: float
    ready: float
    start: float
    end: float


class Link(NamedTuple):
    """The time of an all-reduce is `latency_seconds` + bytes / `bytes_per_second`. `assumed` says
    what was not measured."""

    latency_seconds: float
    bytes_per_second: float
    assumed: str = ""


def reduce_buckets(
    backward_seconds: float, gradient_bytes: float, bucket_bytes: float, link: Link
) -> list[Transfer]:
    """Return when each bucket is ready, starts, and ends. The last bucket gets the rest."""
    transfers: list[Transfer] = []
    free = 0.0
    for number in range(math.ceil(gradient_bytes / bucket_bytes - 1e-9)):
        reduced = min((number + 1) * bucket_bytes, gradient_bytes)
        size = reduced - number * bucket_bytes
        ready = backward_seconds * reduced / gradient_bytes
        start = max(ready, free)
        free = start + link.latency_seconds + size / link.bytes_per_second
        transfers.append(Transfer(size, ready, start, free))
    return transfers


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """Fit a line to measured all-reduces: sizes 1 2 3 and seconds 3 4 5 -> latency 2, rate 1.

    One size does not determine a line, and a noisy fit may be invalid. In both cases, assume a
    latency of 0.
    """
    count, mean, time = len(sizes), sum(sizes) / len(sizes), sum(seconds) / len(seconds)
    spread = sum((size - mean) ** 2 for size in sizes)
    together = sum((a - mean) * (b - time) for a, b in zip(sizes, seconds, strict=True))
    if spread and together > 0 and time - mean * together / spread >= 0:
        return Link(time - mean * together / spread, spread / together)
    why = (
        "only one size was measured" if not spread else "the measured times are too noisy for a fit"
    )
    return Link(0.0, mean * count / (time * count), f"latency 0, because {why}")
