"""The sequence of global batches. It depends only on a seed and a sample counter, not on the ranks,
so all strategies train on the same samples.

Each rank loads only its own span of a global batch. The exception is a `get_batch` function. All
ranks call it with the same seed and create the full batch, so the samples do not depend on the
number of ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from paralab.errors import UsageError
from paralab.plan.batches import GlobalBatch, Span
from paralab.units import plural
from paralab.workload.batch import map_tensors, num_samples, pick, take, tensors
from paralab.workload.randomness import seed_everything, seeded
from paralab.workload.workload import Workload


def dataset_samples(workload: Workload) -> int | None:
    """Return the number of samples, or None for an endless `get_batch`."""
    data = workload.data
    if _in_memory(data):
        return num_samples(data)
    if isinstance(data, IterableDataset):  # torch gives it a __getitem__ that raises
        raise UsageError(
            f"The data of workload {workload.name} is an IterableDataset. Its samples have no "
            "indices, so they cannot be split among ranks.",
            fix="a map-style Dataset (with __len__ and __getitem__), or a function get_batch(n)",
        )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return len(data)
    if callable(data):
        return None
    raise UsageError(
        f"The data of workload {workload.name} is {type(data).__name__}, which paralab cannot "
        "read.",
        fix="tensors (x, y), a map-style Dataset (with __len__ and __getitem__), or a function "
        "get_batch(n)",
    )


def rank_batches(
    workload: Workload,
    batches: Iterable[GlobalBatch],
    span_of: Callable[[GlobalBatch], Span] = lambda batch: (0, batch.size),
    samples: int | None = None,
    seed: int = 0,
    pin_memory: bool = False,
) -> Iterator[tuple[GlobalBatch, Any]]:
    """For each global batch, yield the batch and this rank's samples from it. `samples` is the
    size of the data, unless it is endless.

    A rank's span is empty if a partial last batch has fewer samples than there are replicas. Such a
    rank must still join the collectives, so it gets the batch's first two samples with weight zero
    (two because BatchNorm rejects a single sample).
    """

    def own_span(batch: GlobalBatch) -> Span:
        start, stop = span_of(batch)
        return (start, stop) if stop > start else (0, min(2, batch.size))

    if dataset_samples(workload) is None:
        for batch in batches:
            whole = _call_get_batch(workload, batch, seed)
            yield batch, _pin(take(whole, *own_span(batch)), pin_memory)
        return

    assert samples is not None
    plan = list(batches)
    indices = _choose_samples(plan, samples, seed, own_span)
    if _in_memory(workload.data):
        for batch, rows in zip(plan, pick(workload.data, indices), strict=True):
            yield batch, _pin(rows, pin_memory)
        return

    dataset = cast("Dataset[Any]", workload.data)
    loader: DataLoader[Any] = DataLoader(
        _SeededBatches(dataset, workload.collate or default_collate, seed),
        batch_sampler=(
            [(_position(batch), i) for i in index.tolist()]
            for batch, index in zip(plan, indices, strict=True)
        ),
        # Use a separate generator, because loading must not draw from the model's random stream.
        generator=torch.Generator().manual_seed(seed),
        num_workers=workload.loader_workers,
        collate_fn=_identity,
        pin_memory=pin_memory,
        worker_init_fn=_ignore_sigterm,
    )
    yield from zip(plan, loader, strict=True)


def _in_memory(data: Any) -> bool:
    """Return whether the data is one batch of all samples. A list like [(x0, y0), (x1, y1), …] is a
    map-style Dataset, but a list of two items is a batch: [x, y]."""
    is_dataset = isinstance(data, list) and len(data) > 2 and isinstance(data[0], tuple | dict)
    return not is_dataset and next(tensors(data), None) is not None


def _call_get_batch(workload: Workload, batch: GlobalBatch, seed: int) -> Any:
    get_batch = cast("Callable[[int], Any]", workload.data)
    with seeded(seed, _position(batch)):
        whole = get_batch(batch.size)
    if (size := num_samples(whole)) != batch.size:
        raise UsageError(
            f"get_batch({batch.size}) of workload {workload.name} returned {plural(size, 'sample')}.",
            fix="return n samples from get_batch(n)",
        )
    return whole


def _choose_samples(
    batches: list[GlobalBatch], samples: int, seed: int, own_span: Callable[[GlobalBatch], Span]
) -> Iterator[torch.Tensor]:
    """Yield the indices of this rank's samples. The seed determines each epoch's order."""
    epoch, order = -1, torch.empty(0, dtype=torch.long)
    for batch in batches:
        if batch.epoch != epoch:
            epoch = batch.epoch
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            order = torch.randperm(samples, generator=generator)
        start, stop = own_span(batch)
        yield order[batch.first + start : batch.first + stop]


class _SeededBatches(Dataset[Any]):
    """Complete batches from the user's Dataset, with reproducible random numbers. Each item has the
    batch's position in the run and a sample's index.

    A sample's random numbers (augmentation) depend on the seed, the batch, and the sample. The
    random numbers in collate depend on the seed and the batch. So a run draws the same numbers
    after a resume, or if its batches are split differently. The exception is a dataset that reads
    entire batches, whose random numbers depend on the batch."""

    def __init__(self, data: Dataset[Any], collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.data, self.collate, self.seed = data, collate, seed

    def __getitems__(self, items: list[tuple[int, int]]) -> Any:
        with seeded(self.seed, items[0][0]):
            if _reads_batches(self.data):
                reader: Any = self.data
                return self.collate(list(reader.__getitems__([index for _, index in items])))
            samples = []
            for position, index in items:
                seed_everything(hash((self.seed, position, index)) % 2**32, gpus=False)
                samples.append(self.data[index])
            seed_everything(hash((self.seed, items[0][0])) % 2**32, gpus=False)
            return self.collate(samples)


def _reads_batches(data: Any) -> bool:
    """Return whether a dataset reads entire batches. A Subset does so only if its dataset does."""
    return _reads_batches(data.dataset) if type(data) is Subset else hasattr(data, "__getitems__")


def _identity(batch: Any) -> Any:
    return batch


def _ignore_sigterm(worker: int) -> None:
    """Ignore SIGTERM in a DataLoader worker. A SIGTERM to the entire job must not kill the worker
    while its rank finishes a step and saves. The worker exits with its rank."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _position(batch: GlobalBatch) -> int:
    return batch.epoch * 1_000_003 + batch.first


def _pin(batch: Any, pin_memory: bool) -> Any:
    return map_tensors(lambda t: t if t.is_cuda else t.pin_memory(), batch) if pin_memory else batch
