"""Batch arithmetic: which replica trains on which samples. These are pure functions on plain
numbers.

PyTorch splits 64 samples over 3 replicas into chunks of ceil(64 / 3) = 22, until none are left:

    replica 0   0 ······ 22
    replica 1            22 ······ 44
    replica 2                      44 ···· 64          22 + 22 + 20 = 64

We split replica 0's 22 samples into 4 accumulation steps with 2 micro-batches each:

    [0-3 3-6] [6-9 9-12] [12-15 15-18] [18-20 20-22]   6 + 6 + 6 + 4 = 22
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

Span = tuple[int, int]  # samples start … stop
# fp64 may need 4 times the memory of training, so a check that runs out gets 1/8 of the batch.
LESS = 8


def chunk_sizes(samples: int, parts: int) -> tuple[int, ...]:
    """Split like torch.chunk and nn.DataParallel: ceil(samples / parts) each until none are left.

    64 over 3 -> 22 22 20; 64 over 5 -> 13 13 13 13 12; 4 over 3 -> 2 2 0 (the last part is empty).
    """
    each = -(-samples // parts)
    return tuple(max(0, min(each, samples - part * each)) for part in range(parts))


def even_sizes(samples: int, parts: int) -> tuple[int, ...]:
    """Split as evenly as possible: 32 over 6 -> 6 6 5 5 5 5.

    We use this for accumulation steps and micro-batches, for which PyTorch has no convention.
    """
    return tuple(samples // parts + (part < samples % parts) for part in range(parts))


def shares(samples: int, parts: int) -> tuple[int, ...]:
    """Split like `chunk_sizes`, but leave no part empty if possible: 4 over 3 -> 2 1 1."""
    chunks = chunk_sizes(samples, parts)
    return even_sizes(samples, parts) if samples >= parts and 0 in chunks else chunks


def spans(sizes: tuple[int, ...], first: int = 0) -> list[Span]:
    """Return the span of each part that is not empty: (22, 22, 20) -> (0, 22) (22, 44) (44, 64)."""
    edges = list(itertools.accumulate(sizes, initial=first))
    return [(start, stop) for start, stop in itertools.pairwise(edges) if stop > start]


def replica_span(samples: int, replicas: int, replica: int) -> Span:
    """Return one replica's samples in a global batch. The span may be empty in a partial batch."""
    edges = list(itertools.accumulate(shares(samples, replicas), initial=0))
    return edges[replica], edges[replica + 1]


def pieces(samples: int, accumulate: int, micro_batches: int) -> list[list[Span]]:
    """Split a replica's samples into accumulation steps, and each step into micro-batches.

    Leave out empty steps and micro-batches.
    """
    steps = spans(even_sizes(samples, accumulate))
    return [spans(even_sizes(stop - start, micro_batches), first=start) for start, stop in steps]


def widest(samples: int, accumulate: int, micro_batches: int) -> int:
    """Return the size of the largest micro-batch: 22 samples in 4 steps of 2 micro-batches -> 3."""
    return max(
        stop - start for cuts in pieces(samples, accumulate, micro_batches) for start, stop in cuts
    )


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step on all devices: `size` samples of `epoch`, starting with
    sample `first`."""

    step: int
    epoch: int
    first: int
    size: int


def global_batches(
    batch_size: int, samples: int | None, steps: int | None, epochs: int | None, done: int = 0
) -> Iterator[GlobalBatch]:
    """Yield the global batches of a run, except the first `done`.

    The last batch in an epoch may be smaller, and is never dropped. If `samples` is None, the data
    is endless.
    """
    step = 0
    for epoch in itertools.count():
        if epochs is not None and epoch >= epochs:
            return
        endless = itertools.count(0, batch_size)
        for first in endless if samples is None else range(0, samples, batch_size):
            if steps is not None and step >= steps:
                return
            size = batch_size if samples is None else min(batch_size, samples - first)
            if step >= done:
                yield GlobalBatch(step, epoch, first, size)
            step += 1


def num_steps(batch_size: int, samples: int | None, steps: int | None, epochs: int | None) -> int:
    """Return the number of batches that `global_batches` yields."""
    from_epochs = None if epochs is None or samples is None else epochs * -(-samples // batch_size)
    known = [number for number in (steps, from_epochs) if number is not None]
    assert known, "the run needs a number of steps, or epochs over a finite dataset"
    return min(known)
