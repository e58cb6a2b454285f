"""Cut layers into stages: the slowest stage is as fast as possible, by time, not by count."""

import itertools

import pytest

from paralab.plan.stages import balance, split_by_time, stage_loads
from paralab.workload.summary import Layer
from tests.plan.test_resolve import plan, summary


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


def test_the_activations_that_every_stage_keeps():
    """With 10 bytes of activations per sample and layer, gpipe keeps all micro-batches. With 1f1b,
    a stage keeps one for each stage from itself to the last."""
    layers = tuple(Layer(str(n), (str(n),), 1.0, 100, 10.0) for n in range(3))
    given = {
        "of": summary(layers=layers, optimizer_bytes_per_byte=2.0),
        "stages": 3,
        "batch_size": 12,
        "micro_batches": 6,
    }
    loads = stage_loads(plan("pipeline", **given, schedule="1f1b"))
    assert [(load.micro_batches_kept, load.activations) for load in loads] == [
        (3, 60.0),
        (2, 40.0),
        (1, 20.0),
    ]
    assert [load.activations for load in stage_loads(plan("pipeline", **given))] == [120.0] * 3
    assert [(load.parameters, load.gradients, load.optimizer) for load in loads] == [
        (100, 100, 200.0)
    ] * 3
    assert stage_loads(plan("ddp")) == []


def layers(seconds, flops):
    return [
        Layer(f"l{n}", (f"l{n}",), s, 100, 10.0, f)
        for n, (s, f) in enumerate(zip(seconds, flops, strict=True))
    ]


def test_noise_does_not_move_the_cuts_and_a_clear_difference_does():
    """Four equal layers are timed on a busy machine. Then one is really slow, which no operation
    count shows."""
    flops = [1e9] * 4
    quiet, noisy, slow = [1.0, 1.0, 1.0, 1.0], [1.3, 1.2, 0.5, 0.6], [3.0, 3.0, 0.5, 0.5]
    assert balance(layers(quiet, flops), 2, 8)[0] == [(0, 2), (2, 4)]
    assert split_by_time(noisy, 2) == [(0, 1), (1, 4)]  # by time alone, noise moves the cut
    assert balance(layers(noisy, flops), 2, 8)[0] == [
        (0, 2),
        (2, 4),
    ]  # the operation count keeps it
    assert balance(layers(slow, flops), 2, 8) == ([(0, 1), (1, 4)], "measured time")
    assert balance(layers(quiet, [None] * 4), 2, 8)[1] == "measured time"


def test_a_resumed_run_keeps_the_cuts_of_its_checkpoint():
    found = summary(layers=tuple(layers([3.0, 3.0, 0.5, 0.5], [1e9] * 4)))
    assert plan("pipeline", of=found, stages=2).cuts == ["l0", "l1"]
    assert plan("pipeline", of=found, stages=2, cuts=["l0", "l3"]).cuts == ["l0", "l3"]
    assert plan("pipeline", of=found, stages=3, cuts=["l0", "l3"]).cuts != [
        "l0",
        "l3",
    ]  # a checkpoint with another number of stages
    assert plan("pipeline", of=found, stages=2, cuts=["l0", "gone"]).cuts == [
        "l0",
        "l1",
    ]  # a checkpoint of another model
