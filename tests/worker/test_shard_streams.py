"""Random numbers of shards: equal outside the split layers, different inside."""

import torch

from paralab.worker.shard_streams import ShardStreams


def draw(shard):
    """Return one shard's random numbers before, in, and after a region, and in a second region."""
    torch.manual_seed(7)
    streams = ShardStreams(shard, torch.device("cpu"))
    numbers = [torch.rand(3)]
    for _ in range(2):
        streams.enter()
        streams.enter()  # q, k, and v each enter
        numbers.append(torch.rand(3 + shard))  # the shards may draw different amounts
        streams.leave()
        streams.leave()
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
        streams.enter()
        drawn.append(torch.rand(4))
        streams.leave()
    assert drawn[0].equal(drawn[1])
