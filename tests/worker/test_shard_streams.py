"""Random numbers of shards: equal outside the split layers, different inside."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paralab.worker.sharding.shard_streams import ShardStreams
from paralab.worker.sharding.sharded_layers import watch_regions
from paralab.workload.tensor_group import TensorGroup


def draw(shard):
    """Return one shard's random numbers before, in, and after a region, and in a second region."""
    torch.manual_seed(7)
    streams = ShardStreams(shard, torch.device("cpu"))
    numbers = [torch.rand(3)]
    for _ in range(2):
        streams.enter("o")
        streams.enter("o")  # q, k, and v each enter
        numbers.append(torch.rand(3 + shard))  # the shards may draw different amounts
        streams.leave("o")
        streams.leave("o")
        numbers.append(torch.rand(3))
    return numbers


def test_shards_differ_only_in_their_regions():
    (before, inside, between, again, after), other = draw(0), draw(1)
    for mine, theirs in zip((before, between, after), other[::2], strict=True):
        assert mine.equal(theirs)
    assert not inside.equal(other[1][:3])
    assert not again.equal(other[3][:3])
    assert not inside.equal(again)


def test_a_repeated_forward_pass_repeats_its_numbers():
    """Like activation checkpointing, this restores only the common state."""
    streams = ShardStreams(1, torch.device("cpu"))
    state = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        torch.set_rng_state(state)
        streams.enter("o")
        drawn.append(torch.rand(4))
        streams.leave("o")
    assert drawn[0].equal(drawn[1])


@pytest.mark.parametrize("order", ["nested", "overlapping"])
def test_a_region_in_another_one_does_not_end_it(order):
    """In the attention of Swin v2, a small network computes a bias between q, k, v and o. Dropout
    on the attention weights then drew the same numbers on all shards."""
    inside, after = [], []
    for shard in range(2):
        torch.manual_seed(7)
        streams = ShardStreams(shard, torch.device("cpu"))
        first, second = ("inner", "outer") if order == "nested" else ("outer", "inner")
        streams.enter("outer")
        streams.enter("inner")
        streams.leave(first)
        inside.append(torch.rand(3))
        streams.leave(second)
        after.append(torch.rand(3))
    assert not inside[0].equal(inside[1])
    assert after[0].equal(after[1])


def test_a_region_that_a_forward_pass_did_not_leave_ends_with_the_step():
    drawn = []
    for shard in range(2):
        torch.manual_seed(7)
        streams = ShardStreams(shard, torch.device("cpu"))
        streams.enter("o")
        torch.rand(3 + shard)
        streams.begin_passes()
        drawn.append(torch.rand(3))
    assert drawn[0].equal(drawn[1])


@pytest.mark.parametrize("frozen", [False, True])
def test_blocks_that_begin_within_a_region_repeat_their_numbers(frozen):
    """A column layer and its row are in different blocks. When these were recomputed, dropout once
    drew other numbers, and the gradients were wrong. If the row is frozen, checkpoint also stops
    before it."""

    def gradients(recompute):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)) for _ in range(4)]
        model = nn.Sequential(*blocks)
        model[1][0].requires_grad_(not frozen)
        streams = ShardStreams(1, torch.device("cpu"))
        groups = [TensorGroup("", ("0.0",), "1.0", 0), TensorGroup("", ("2.0",), "3.0", 0)]
        watch_regions(model, groups, streams.enter, streams.leave)
        for _ in range(2):
            streams.begin_passes()
            x = torch.ones(4, 8, requires_grad=True)
            for block in model:
                x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            x.square().sum().backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    for mine, theirs in zip(gradients(True), gradients(False), strict=True):
        assert mine.equal(theirs)
