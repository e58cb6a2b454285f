"""Splits of a batch, drawn as pictures."""

import itertools

import pytest
import torch

from paralab.plan.batches import (
    chunk_sizes,
    global_batches,
    num_steps,
    pieces,
    replica_span,
    shares,
)


@pytest.mark.parametrize(
    ("samples", "parts", "expected"),
    [
        (64, 1, (64,)),
        (64, 2, (32, 32)),
        (64, 3, (22, 22, 20)),
        (64, 5, (13, 13, 13, 13, 12)),
        (4, 3, (2, 2, 0)),
        (2, 3, (1, 1, 0)),
    ],
)
def test_chunk_sizes_are_those_of_dataparallel(samples, parts, expected):
    assert chunk_sizes(samples, parts) == expected
    chunks = tuple(len(chunk) for chunk in torch.arange(samples).chunk(parts))
    assert tuple(size for size in expected if size) == chunks


def test_no_share_is_empty_if_there_are_enough_samples():
    assert shares(64, 3) == (22, 22, 20)
    assert shares(4, 3) == (2, 1, 1)
    assert shares(2, 3) == (1, 1, 0)


def test_nothing_is_dropped():
    for samples, parts in itertools.product(range(1, 40), range(1, 9)):
        assert sum(shares(samples, parts)) == sum(chunk_sizes(samples, parts)) == samples
        spans = [replica_span(samples, parts, part) for part in range(parts)]
        assert spans[0][0] == 0
        assert spans[-1][1] == samples
        assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))


def test_pieces_of_a_replica():
    assert pieces(22, accumulate=4, micro_batches=2) == [
        [(0, 3), (3, 6)],
        [(6, 9), (9, 12)],
        [(12, 15), (15, 17)],
        [(17, 20), (20, 22)],
    ]
    assert pieces(2, accumulate=4, micro_batches=3) == [[(0, 1)], [(1, 2)]]


def test_the_last_batch_of_an_epoch_is_smaller_and_not_dropped():
    def drawn(**given):
        return [(b.epoch, b.first, b.size) for b in global_batches(**given)]

    assert drawn(batch_size=4, samples=10, steps=5, epochs=None) == [
        (0, 0, 4),
        (0, 4, 4),
        (0, 8, 2),
        (1, 0, 4),
        (1, 4, 4),
    ]
    assert drawn(batch_size=4, samples=10, steps=None, epochs=1) == [
        (0, 0, 4),
        (0, 4, 4),
        (0, 8, 2),
    ]
    assert drawn(batch_size=4, samples=None, steps=2, epochs=None) == [(0, 0, 4), (0, 4, 4)]


@pytest.mark.parametrize(
    ("steps", "epochs", "expected"), [(5, None, 5), (None, 2, 6), (5, 1, 3), (2, 1, 2)]
)
def test_num_steps_counts_the_global_batches(steps, epochs, expected):
    given = {"batch_size": 4, "samples": 10, "steps": steps, "epochs": epochs}
    assert num_steps(**given) == expected == len(list(global_batches(**given)))
