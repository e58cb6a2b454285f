"""The sequence of global batches, the same for every strategy: a seed and a sample counter decide
it, not the ranks.

Each rank loads only its own span of every global batch, except from `get_batch` functions, which
make the whole batch on every rank (from the same seed) so that any number of ranks sees the same
samples.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from paralab.errors import UsageError
from paralab.plan.batches import GlobalBatch, Span, global_batches
from paralab.workload.batch import map_tensors, num_samples, take, tensors
from paralab.workload.randomness import seed_everything, seeded
from paralab.workload.workload import Workload


def dataset_samples(workload: Workload) -> int | None:
    """How many samples the data has; None for an endless `get_batch`."""
    data = workload.data
    if any(True for _ in tensors(data)):
        return num_samples(data)
    if isinstance(data, IterableDataset):  # torch gives it a __getitem__ that raises
        raise UsageError(
            f"The data of workload {workload.name} is an IterableDataset, whose samples cannot be asked for by number, so ranks "
            "cannot share them.",
            fix="a map-style Dataset (with __len__ and __getitem__), or a function get_batch(n)",
        )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return len(data)
    if callable(data):
        return None
    raise UsageError(
        f"The data of workload {workload.name} is {type(data).__name__}, which paralab cannot read.",
        fix="tensors (x, y), a map-style Dataset (with __len__ and __getitem__), or a function get_batch(n)",
    )


def rank_batches(
    workload: Workload,
    spans_of: Callable[[GlobalBatch], Span],
    *,
    batch_size: int,
    samples: int | None,
    steps: int | None,
    epochs: int | None,
    seed: int,
    done: int = 0,
    pin_memory: bool = False,
) -> Iterator[tuple[GlobalBatch, Any]]:
    """(global batch, this rank's samples of it), step by step.

    A rank whose span is empty (a partial last batch smaller than the replicas) is given the batch's
    first two samples, to be weighted with zero: it must still take part in the collectives (two,
    because BatchNorm refuses a single one).
    """
    batches = global_batches(batch_size, samples, steps, epochs, done)

    def wanted(batch: GlobalBatch) -> Span:
        start, stop = spans_of(batch)
        return (start, stop) if stop > start else (0, min(2, batch.size))

    if dataset_samples(workload) is None:
        make = cast("Callable[[int], Any]", workload.data)
        for batch in batches:
            with seeded(seed, _position(batch)):
                whole = make(batch.size)
            if (made := num_samples(whole)) != batch.size:
                raise UsageError(
                    f"get_batch({batch.size}) of workload {workload.name} made {made} samples.",
                    fix="return as many samples as get_batch is asked for",
                )
            yield batch, _pinned(take(whole, *wanted(batch)), pin_memory)
        return

    assert samples is not None
    plan = list(batches)
    orders = _Orders(samples, seed)
    indices = (
        orders.of(b.epoch)[b.first + start : b.first + stop]
        for b in plan
        for start, stop in [wanted(b)]
    )
    if any(True for _ in tensors(workload.data)):
        for batch, index in zip(plan, indices, strict=True):
            yield batch, _pinned(map_tensors(itemgetter(index), workload.data), pin_memory)
        return
    loader: DataLoader[Any] = DataLoader(
        _Seeded(cast("Dataset[Any]", workload.data), workload.collate or default_collate, seed),
        batch_sampler=_Lists(plan, indices),
        generator=torch.Generator().manual_seed(
            seed
        ),  # its own, so that loading takes nothing from the model's random stream
        num_workers=workload.loader_workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory,
        worker_init_fn=_outlive_the_signal,
    )
    yield from zip(plan, loader, strict=True)


class _Orders:
    """The order of the samples in each epoch, from the seed alone; the last one is kept."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed, self.epoch = samples, seed, -1
        self.order = torch.empty(0, dtype=torch.long)

    def of(self, epoch: int) -> torch.Tensor:
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self.epoch, self.order = epoch, torch.randperm(self.samples, generator=generator)
        return self.order


class _Lists:
    """A batch sampler: the index lists of one rank, each index with the position of its batch in
    the training."""

    def __init__(self, batches: list[GlobalBatch], indices: Iterator[torch.Tensor]) -> None:
        self.batches, self.indices = batches, indices

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch, index in zip(self.batches, self.indices, strict=True):
            yield [(_position(batch), i) for i in index.tolist()]


class _Seeded(Dataset[Any]):
    """Whole batches of the user's Dataset, with reproducible random numbers.

    What a sample draws (augmentation) depends on the seed, the batch and the sample; what collate
    draws, on the seed and the batch. So a split batch and a resumed training draw the same
    numbers."""

    def __init__(self, data: Dataset[Any], collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.data, self.collate, self.seed = data, collate, seed

    def __getitems__(self, items: list[tuple[int, int]]) -> Any:
        with seeded(self.seed, items[0][0]):
            if at_once := getattr(self.data, "__getitems__", None):
                return self.collate(list(at_once([index for _, index in items])))
            samples = []
            for (
                position,
                index,
            ) in items:  # what a sample draws must not depend on which others are loaded with it
                seed_everything(hash((self.seed, position, index)) % 2**32, gpus=False)
                samples.append(self.data[index])
            seed_everything(hash((self.seed, items[0][0])) % 2**32, gpus=False)
            return self.collate(samples)


def _as_it_is(batch: Any) -> Any:
    return batch


def _outlive_the_signal(worker: int) -> None:
    """A SIGTERM to all processes of a job must not take the samples from a rank that finishes its
    step to save. The worker ends with its rank."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _position(batch: GlobalBatch) -> int:
    return batch.epoch * 1_000_003 + batch.first


def _pinned(batch: Any, pin_memory: bool) -> Any:
    return map_tensors(lambda t: t if t.is_cuda else t.pin_memory(), batch) if pin_memory else batch
