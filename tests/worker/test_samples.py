"""Any number of ranks gets the same samples in the same global batches."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from paralab.errors import UsageError
from paralab.plan.batches import global_batches, replica_span
from paralab.worker.samples import dataset_samples, rank_batches
from paralab.workload.workload import Workload


class Numbers(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"input": torch.tensor(float(index)), "target": torch.tensor(index)}


def noisy(count):
    """A user's get_batch with three sources of randomness."""
    x = torch.randn(count, 2) + random.random() + float(np.random.rand())
    return x, x


def workload(data, **fields):
    return Workload(
        model=torch.nn.Identity,
        data=data,
        loss=lambda output, target: output,
        name="test",
        **fields,
    )


def steps(data, replicas, replica, samples=10, **fields):
    return [
        rows
        for _, rows in rank_batches(
            workload(data, **fields),
            global_batches(4, samples, 6, None),
            lambda batch: replica_span(batch.size, replicas, replica),
            samples,
            seed=3,
        )
    ]


MEMORY = {"input": torch.arange(10.0), "target": torch.arange(10)}


def test_lists_in_memory_are_split_like_tensors():
    """Each batch once contained the whole list, so entries belonged to other samples."""
    data = (torch.arange(10.0), {"words": list("abcdefghij"), "classes": ["yes", "no"]})
    for numbers, more in steps(data, 2, 1):
        assert more == {
            "words": ["abcdefghij"[int(number)] for number in numbers],
            "classes": ["yes", "no"],  # not one entry per sample
        }


@pytest.mark.parametrize(("data", "samples"), [(MEMORY, 10), (Numbers(), 10), (noisy, None)])
@pytest.mark.parametrize("replicas", [2, 3])
def test_ranks_together_see_what_one_rank_sees(data, samples, replicas):
    def first(rows):
        return rows["input"] if isinstance(rows, dict) else rows[0]

    alone = [first(rows) for rows in steps(data, 1, 0, samples)]
    together = zip(
        *(map(first, steps(data, replicas, replica, samples)) for replica in range(replicas)),
        strict=True,
    )
    for whole, parts in zip(alone, together, strict=True):
        # Leave out the samples of an idle rank, which have weight zero.
        joined = torch.cat(parts)[: len(whole)]
        assert torch.equal(joined, whole)


def test_an_epoch_sees_every_sample_once_and_the_order_changes():
    first, second = [
        torch.cat([rows["target"] for rows in steps(MEMORY, 1, 0)[a : a + 3]]).tolist()
        for a in (0, 3)
    ]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_memory_and_dataset_give_the_same_batches():
    for one, other in zip(steps(MEMORY, 2, 1), steps(Numbers(), 2, 1), strict=True):
        assert torch.equal(one["target"], other["target"])


def test_a_list_of_samples_is_a_dataset():
    """It was once read as one batch: 64 samples of 6 words each looked like 6 samples."""
    samples = [(torch.full((3,), float(i)), i) for i in range(6)]
    data = workload(samples)
    assert dataset_samples(data) == 6
    assert dataset_samples(workload([torch.zeros(5, 3), torch.zeros(5)])) == 5  # [x, y]
    assert dataset_samples(workload(samples[:2])) == 3  # [x, y] with nested x and y
    seen = [y for _, (_, y) in rank_batches(data, global_batches(3, 6, 2, None), samples=6)]
    assert sorted(torch.cat(seen).tolist()) == list(range(6))


def test_get_batch_does_not_disturb_other_randomness():
    torch.manual_seed(0)
    random.seed(0)
    expected = torch.rand(1), random.random()
    torch.manual_seed(0)
    random.seed(0)
    steps(noisy, 1, 0, None)
    assert (torch.rand(1), random.random()) == expected


@pytest.mark.processes
def test_loader_workers_give_the_same_batches():
    plain, loaded = steps(Numbers(), 2, 0), steps(Numbers(), 2, 0, loader_workers=1)
    assert all(torch.equal(a["target"], b["target"]) for a, b in zip(plain, loaded, strict=True))


def test_wrong_data_is_refused():
    with pytest.raises(UsageError, match="3 samples"):
        steps(lambda count: (torch.zeros(3), torch.zeros(3)), 1, 0, None)
    with pytest.raises(UsageError, match="cannot read"):
        dataset_samples(workload(3))
    with pytest.raises(UsageError, match=r"\(3,\), \(4,\)"):
        dataset_samples(workload((torch.zeros(3), torch.zeros(4))))


class Augmented(Dataset):
    """Every kind of random number, per sample."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor(
            [index + random.random(), float(torch.rand(())), float(np.random.rand())],
            dtype=torch.float64,
        )


@pytest.mark.parametrize("data", [Augmented(), Subset(Augmented(), range(12))])
@pytest.mark.parametrize("edges", [[(0, 6)], [(0, 3), (3, 6)], [(0, 1), (1, 5), (5, 6)]])
def test_a_sample_draws_the_same_on_every_rank(data, edges):
    """Every rank once drew from the start of the batch's seed, so its augmentations differed from
    those of one device. With a Subset (from random_split), this bug remained longer, because a
    Subset can read batches."""
    workload = Workload(
        model=lambda: None, data=data, loss=lambda output, target: output, name="augmented"
    )

    def loaded(span):
        batches = rank_batches(
            workload, global_batches(6, 12, 4, None), lambda batch: span, samples=12, seed=5
        )
        return [samples for _, samples in batches]

    whole = loaded((0, 6))
    parts = [torch.cat(step) for step in zip(*(loaded(edge) for edge in edges), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert (
        len({tuple(row) for step in whole for row in step.tolist()}) == 24
    )  # and not the same in the next epoch
