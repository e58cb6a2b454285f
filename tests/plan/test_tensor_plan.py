"""The ranks of a tensor-parallel plan: all see the same samples, and one reports the loss."""

import json
from dataclasses import replace

import pytest

from paralab.errors import UsageError
from paralab.machine.precision import Probe
from paralab.plan.grid import Place
from paralab.plan.plan import Plan, label
from paralab.plan.request import Request
from paralab.plan.resolve import resolve
from tests.plan.test_resolve import CPU, GPU, OLD, machine, summary
from tests.plan.test_tensor_groups import tensor_plan


def tp(on=CPU, places=(), proved=4, changes=None, **options):
    given = summary(tensor_plan=replace(tensor_plan(), shards=proved), **(changes or {}))
    request = Request("tp", **options)
    return resolve(request, on, given, lambda name: Probe(True, "tried"), None, places)


def test_each_shard_is_a_rank_with_all_samples():
    plan = tp(shards=4, batch_size=10, accumulate=2)
    assert [rank.samples_per_step for rank in plan.ranks] == [10, 10, 10, 10]
    assert [rank.shard for rank in plan.ranks] == [0, 1, 2, 3]
    assert {rank.replica for rank in plan.ranks} == {0}
    assert (plan.replicas, plan.shards, plan.world_size, plan.num_devices) == (1, 4, 4, 4)
    assert plan.arithmetic == "10 = 2 accumulation steps × 5 samples, on each of 4 shards"
    assert label(plan) == "tp · 4 shards · accumulate 2"


def test_one_shard_counts_and_all_draw_the_same_numbers():
    plan = tp(shards=4)
    assert [rank.counts(plan.stages) for rank in plan.ranks] == [True, False, False, False]
    assert [rank.random_stream for rank in plan.ranks] == [0, 0, 0, 0]


def test_gpus_and_launched_ranks_are_shards():
    plan = tp(on=machine(GPU, OLD), proved=2)
    assert [rank.devices[0].name for rank in plan.ranks] == ["cuda:0", "cuda:1"]
    places = [Place("n1", number, (), 1.0) for number in range(3)]
    assert tp(places=places, proved=3).shards == 3
    with pytest.raises(UsageError, match="needs 2 ranks, but 3 were launched"):
        tp(places=places, proved=2, shards=2)


def test_only_dropout_is_a_difference():
    """All shards see the entire batch, so BatchNorm and state are those of one device."""
    assert tp(shards=4, changes={"batch_norms": 2, "state": ("steps",)}).differences == ()
    [difference] = tp(shards=4, changes={"dropout": True}).differences
    assert "dropout" in difference


def test_a_plan_survives_its_file():
    plan = tp(shards=4)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
