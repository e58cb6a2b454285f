"""Layers onto stages: the slowest stage is as fast as possible, by time and not by count."""

import itertools

import pytest

from paralab.plan.stages import split_by_time


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([3, 1, 1, 1, 2], [[3, 1], [1, 1, 2]]),
        ([1, 1, 1, 1], [[1, 1], [1, 1]]),
        ([9, 1, 1, 1], [[9], [1, 1, 1]]),
        ([1, 1, 1, 9], [[1, 1, 1], [9]]),
    ],
)
def test_two_stages(seconds, expected):
    assert [seconds[first:stop] for first, stop in split_by_time(seconds, 2)] == expected


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_no_other_split_is_faster(stages):
    seconds = [0.5, 2.0, 0.1, 1.1, 3.0, 0.2, 0.7]

    def slowest(edges):
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise(edges))

    parts = split_by_time(seconds, stages)
    edges = [parts[0][0], *(stop for _, stop in parts)]
    every = ([0, *middle, 7] for middle in itertools.combinations(range(1, 7), stages - 1))
    assert slowest(edges) == pytest.approx(min(map(slowest, every)))
    assert all(stop > first for first, stop in parts)
