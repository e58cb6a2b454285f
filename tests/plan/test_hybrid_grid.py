"""`hybrid` as a grid of replicas × stages × shards: its ranks, its stages, and what is refused."""

import json
from dataclasses import replace

import pytest

from paralab.analyse.grid_tables import grid_tables
from paralab.errors import UsageError
from paralab.machine.precision import Probe
from paralab.plan.grid import Place
from paralab.plan.plan import Plan, label
from paralab.plan.request import Request
from paralab.plan.resolve import resolve
from paralab.plan.stage_groups import keep_together, leave_cut_groups
from paralab.plan.stages import stage_loads
from paralab.workload.summary import Layer, Unit
from paralab.workload.tensor_group import TensorGroup, TensorPlan
from tests.plan.test_resolve import CPU, summary

NAMES = ("embed", "a.up", "a.down", "b.up", "b.down", "head")
LAYERS = tuple(Layer(name, (name,), 1.0, 100) for name in NAMES)


def group(block, **more):
    up, down = f"{block}.up", f"{block}.down"
    return TensorGroup(block, (up,), down, 20, **{"kept": True, "error": 1e-16} | more)


GROUPS = group("a"), group("b")


def hybrid(groups=GROUPS, places=(), facts=None, **options):
    proved = TensorPlan(2, groups, parameters=100)
    given = summary(tensor_plan=proved, layers=LAYERS, **(facts or {}))
    request = Request("hybrid", **options)
    return resolve(request, CPU, given, lambda name: Probe(True, "tried"), None, places)


@pytest.fixture
def plan():
    return hybrid(replicas=2, stages=2, shards=2, batch_size=10)


def test_every_cell_is_a_rank(plan):
    assert [rank.cell for rank in plan.ranks] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]
    assert (plan.num_devices, plan.world_size, plan.rank_replicas) == (8, 8, 2)
    assert [rank.samples_per_step for rank in plan.ranks] == [5] * 8
    # The last stage's first shard reports the loss, and the shards of a stage draw the same numbers.
    assert [rank.rank for rank in plan.ranks if rank.counts(plan.stages)] == [2, 6]
    assert [rank.random_stream for rank in plan.ranks] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_stages_with_shards_need_a_schedule(plan):
    assert plan.schedule == "1f1b"
    assert label(plan) == "hybrid ×2 · 2 stages · 2 shards · 1f1b · 4 micro-batches"
    assert hybrid(stages=2, shards=2, schedule="gpipe").schedule == "gpipe"
    flat = hybrid(stages=1, shards=2)
    assert (flat.schedule, flat.micro_batches, flat.world_size) == (None, 1, 4)
    assert [rank.stage for rank in flat.ranks] == [None] * 4


def test_fsdp_needs_a_process_per_stage():
    """ZeRO-1 is DDP with a sharded optimizer, so it does not."""
    plan = hybrid(zero=3)
    assert (plan.schedule, plan.world_size) == ("1f1b", 4)
    assert {axis.name: axis.collectives for axis in plan.axes}["replicas"] == (
        "all_gather",
        "reduce_scatter",
    )
    assert hybrid(zero=2, schedule="zero-bubble").schedule == "zero-bubble"
    plan = hybrid(zero=1)
    assert (plan.schedule, plan.world_size) == (None, 2)
    assert [device.role for device in plan.ranks[1].devices] == ["stage 0", "stage 1"]
    assert hybrid(zero=1, shards=2).world_size == 8
    places = [Place("n1", number, (), 1.0) for number in range(8)]
    assert hybrid(places=places, zero=3).replicas == 4


def test_no_cut_is_inside_a_unit():
    """The stages begin at embed and at b.up: a unit that a cut divides is gathered with the rest."""
    units = ("embed", "a", "b", "b.down", "head")
    facts = {"units": tuple(Unit(name, 10) for name in units)}
    plan = hybrid(zero=3, facts=facts, micro_batches=2)
    assert plan.cuts == ["embed", "b.up"]
    assert plan.shard_units == ("embed", "a", "b.down", "head")


def test_one_shard_is_the_default():
    plan = hybrid()
    assert (plan.shards, plan.tensor_plan, plan.schedule, plan.world_size) == (1, None, None, 2)
    assert label(plan) == "hybrid ×2 · 2 stages · 4 micro-batches"
    assert label(Request("hybrid")) == "hybrid ×2 · 2 stages"
    assert label(Request("tp")) == "tp · 2 shards"


def test_each_axis_has_its_collectives(plan):
    assert {axis.name: axis.collectives for axis in plan.axes} == {
        "replicas": ("all_reduce",),
        "stages": ("send", "receive"),
        "shards": ("all_reduce",),
    }
    sharded = hybrid(stages=1, shards=2, zero=3)
    assert {axis.name: axis.collectives for axis in sharded.axes} == {
        "replicas": ("all_gather", "reduce_scatter"),
        "shards": ("all_reduce",),
    }


def test_the_grid_is_drawn(plan):
    cells, axes = grid_tables(plan)
    assert cells.columns == ("", "stage 0", "stage 1")
    assert [[cell.text for cell in row] for row in cells.rows] == [
        ["replica 0, shard 0", "rank 0, cpu:0", "rank 2, cpu:2"],
        ["replica 0, shard 1", "rank 1, cpu:1", "rank 3, cpu:3"],
        ["replica 1, shard 0", "rank 4, cpu:4", "rank 6, cpu:6"],
        ["replica 1, shard 1", "rank 5, cpu:5", "rank 7, cpu:7"],
    ]
    assert [row[1].text for row in axes.rows] == [
        "0 4, 1 5, 2 6, 3 7",
        "0 2, 1 3, 4 6, 5 7",
        "0 1, 2 3, 4 5, 6 7",
    ]
    assert grid_tables(hybrid(stages=1, shards=2, replicas=1)) == ()  # only one axis


def test_stages_in_one_process_are_drawn_too():
    cells, axes = grid_tables(hybrid())
    assert [[cell.text for cell in row] for row in cells.rows] == [
        ["replica 0", "rank 0, cpu:0", "rank 0, cpu:2"],
        ["replica 1", "rank 1, cpu:1", "rank 1, cpu:3"],
    ]
    assert [[cell.text for cell in row][:3] for row in axes.rows] == [
        ["replicas", "0 1", "all-reduce"],
        ["stages", "within each rank", "copies"],
    ]


def test_cuts_keep_groups_together():
    """Three parts: without merging, the stages would begin at embed, a.down, and b.down."""
    names = [layer.name for layer in keep_together(LAYERS, TensorPlan(2, GROUPS), 3)]
    assert names == ["embed", "a.up", "b.up", "head"]
    assert len(keep_together(LAYERS, TensorPlan(2, GROUPS), 5)) == 5  # only one group fits
    assert keep_together(LAYERS, None, 3) == LAYERS
    plan = hybrid(stages=3, shards=2, micro_batches=3)
    assert set(plan.cuts) <= {"embed", "a.up", "b.up", "head"}
    assert len(plan.tensor_plan.kept) == 2


def test_a_group_that_is_cut_stays_whole():
    plan = hybrid(stages=5, shards=2, micro_batches=5)
    [kept], [left] = plan.tensor_plan.kept, [g for g in plan.tensor_plan.groups if not g.kept]
    assert (kept.block, left.block) == ("a", "b")
    assert "b.down" in left.reason
    with pytest.raises(UsageError, match=r"cut at 'a\.down', between a\.up and a\.down"):
        hybrid(stages=6, shards=2, micro_batches=6)


def test_groups_that_divide_the_same_number_stay_whole_together():
    """One of them is cut. The other one was proved with this number divided for both."""
    divided = (("net.heads", 2),)
    groups = group("a", divided=divided), group("b", divided=divided), group("c")
    parts = hybrid(stages=5, shards=2, micro_batches=5).stage_parts
    split = leave_cut_groups(TensorPlan(2, groups), parts)
    assert [each.kept for each in split.groups] == [False, False, True]


def test_a_divided_number_must_not_reach_into_another_stage():
    """The model itself has the number of heads, which modules in both stages read."""
    shared = group("a", divided=(("heads", 2),))
    plan = hybrid(groups=(shared, group("b")), stages=2, shards=2)
    assert [each.kept for each in plan.tensor_plan.groups] == [False, True]


def test_layers_in_pieces_are_not_sharded_again():
    groups = group("a", parts=3), group("b")
    flat = {"stages": 1, "shards": 2}
    assert len(hybrid(groups=groups, **flat).tensor_plan.kept) == 2
    assert [each.block for each in hybrid(groups=groups, zero=3, **flat).tensor_plan.kept] == ["b"]
    # The other group was proved with the same number divided.
    divided = tuple(replace(each, divided=(("net.heads", 2),)) for each in groups)
    kept = hybrid(groups=(*divided, group("c")), zero=3, **flat).tensor_plan.kept
    assert [each.block for each in kept] == ["c"]


def test_the_estimate_of_a_stage_counts_one_shard(plan):
    """Each stage has a group of 20 parameters, of which 10 are on the other shard."""
    totals = [sum(part.parameter_bytes for part in [stage]) for stage in plan.stage_parts]
    assert [load.parameters for load in stage_loads(plan)] == [total - 40 for total in totals]
    assert [load.activations for load in stage_loads(plan)] == [None, None]


def test_an_optimizer_that_needs_all_parameters_has_them_only_in_dp_times_tp():
    whole = {"whole_model": True}
    assert hybrid(stages=1, shards=2, facts=whole).world_size == 4
    for options, fix in (({"stages": 2}, "--stages 1"), ({"stages": 1, "zero": 3}, "--zero")):
        with pytest.raises(UsageError, match="all") as refused:
            hybrid(shards=2, facts=whole, **options)
        assert fix in refused.value.fix


def test_launched_ranks_are_replicas_of_stages_and_shards():
    places = [Place("n1", number, (), 1.0) for number in range(8)]
    assert hybrid(places=places, shards=2).replicas == 2
    assert hybrid(places=places, shards=2, stages=1).replicas == 4
    with pytest.raises(UsageError, match="needs 4 ranks, but 8 were launched"):
        hybrid(places=places, shards=2, replicas=1)


@pytest.mark.parametrize(
    ("options", "problem", "fix"),
    [
        ({"zero": 3, "schedule": "zero-bubble"}, "--zero 3", "--zero 2"),
        ({"zero": 3, "stages": 1}, "is the same as fsdp", "fsdp --zero 3"),
        ({"zero": 1, "stages": 1}, "is the same as fsdp", "fsdp --zero 1"),
        ({"zero": 3, "placement": "same"}, "--zero 3", "leave out"),
        ({"zero": 2, "bucket_view": True}, "--zero 2", "leave out"),
        ({"stages": 1, "shards": 2, "micro_batches": 4}, "--stages 1", "--accumulate"),
        ({"stages": 1, "shards": 2, "schedule": "gpipe"}, "--stages 1", "leave out --schedule"),
        ({"stages": 1, "shards": 2, "schedule": "gpipe", "zero": 3}, "--stages 1", "leave out"),
        ({"shards": 2, "bucket_view": True}, "--shards 2", "leave out"),
        ({"shards": 2, "placement": "same"}, "--shards 2", "leave out"),
    ],
)
def test_grids_that_do_not_exist_are_refused(options, problem, fix):
    with pytest.raises(UsageError, match=problem) as refused:
        hybrid(**options)
    assert fix in refused.value.fix
