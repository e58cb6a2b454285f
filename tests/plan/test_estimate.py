"""Divide a memory trial between devices. The toy model has two layers, and all its numbers differ:

        rows   parameters  gradients  state  other     saved per sample
layer 0    6          600        600    600      4     10
layer 1    2          200        200    200      4     30, and the loss 5 (7 if alone)
"""

from dataclasses import replace

import pytest

from paralab.plan.estimate import estimate, find_unsupported, micro_batch_sizes
from paralab.plan.memory_trial import MemoryTrial, Pass, Weight
from paralab.plan.option import options_of
from paralab.plan.request import STRATEGIES, Request
from paralab.plan.sharding import owners
from paralab.workload.summary import Layer, Unit
from paralab.workload.tensor_group import TensorGroup, TensorPlan
from tests.plan.test_resolve import plan, summary

P, G, OPT = 800, 800, 808  # parameter, gradient, and state bytes of the whole model
BUFFERS, BATCH, TEMPORARY = 8, 2, 100  # bytes; bytes per sample; of the optimizer step


def one_pass(n, cut, again):
    saved = (10 * n, 30 * n) if cut else (40 * n,)
    recomputed = tuple(each * n for each in again)
    return Pass(
        n, BATCH * n, saved, 5 * n, 7 * n, first=50 * n, again=60 * n, recomputed=recomputed
    )


def trial(cut=False, sizes=(8, 16), again=(), **changes):
    weights = (
        Weight("0.weight", 6, 150, 600, True, 600, 600, 4),
        Weight("1.weight", 2, 50, 200, True, 200, 200, 4),
    )
    passes = tuple(one_pass(n, cut, again) for n in sizes)
    return MemoryTrial(weights, {"1.mean": BUFFERS}, (), passes, TEMPORARY, **changes)


def make(strategy, **options):
    layers = tuple(Layer(n, (n,), 1.0, 100, 10.0) for n in "01")
    units = (Unit("0", 600), Unit("1", 200))
    found = summary(layers=layers, units=units, optimizer_bytes_per_byte=1.0)
    return plan(strategy, of=found, **{"batch_size": 16} | options)


def devices(strategy, again=(), **options):
    made = make(strategy, **options)
    return estimate(made, trial(cut=bool(made.stage_parts), again=again))


def kinds(found):
    return [(each.parameters, each.gradients, each.optimizer, each.activations) for each in found]


# A replica's whole model is on one device; a(n) = 45 n.
@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("single", {}, [(P, G, OPT, 45 * 16)]),
        ("single", {"accumulate": 2}, [(P, G, OPT, 45 * 8)]),
        ("ddp", {"replicas": 2}, [(P, G, OPT, 45 * 8)] * 2),
        ("ddp", {"replicas": 3}, [(P, G, OPT, 45 * 6), (P, G, OPT, 45 * 6), (P, G, OPT, 45 * 4)]),
        # The first device has the loss of all 16 samples, and the only optimizer.
        ("dp", {"replicas": 2}, [(P, G, OPT, 40 * 8 + 7 * 16), (P, G, 0, 40 * 8)]),
        ("dp", {"replicas": 2, "accumulate": 2}, [(P, G, OPT, 40 * 4 + 7 * 8), (P, G, 0, 40 * 4)]),
    ],
)
def test_whole_models(strategy, options, expected):
    assert kinds(devices(strategy, **options)) == expected


def test_fsdp_shards_rows():
    """6 and 2 rows over 2 ranks -> 3 3 and 1 1; over 4 ranks -> 2 2 2 0 and 1 1 0 0. Each rank keeps
    the other state (a step counter) of both parameters."""
    assert kinds(devices("fsdp", replicas=2)) == [(400, 400, 408, 45 * 8)] * 2
    assert [each[:3] for each in kinds(devices("fsdp", replicas=4))] == [
        (200 + 100, 200 + 100, 200 + 100 + 8),
        (200 + 100, 200 + 100, 200 + 100 + 8),
        (200, 200, 200 + 8),
        (0, 0, 8),
    ]


@pytest.mark.parametrize(
    ("options", "gathered", "unreduced"),
    [
        ({}, 600 + 200, 600),  # both units, because one is prefetched; the larger unit's gradients
        ({"accumulate": 2}, 600 + 200, 600 + 200),  # only the last step reduces
        ({"accumulate": 2, "sync_every_pass": True}, 600 + 200, 600),
        ({"precision": "bf16"}, 2 * (150 + 50), 600),  # gathered in bf16, reduced in fp32
    ],
)
def test_fsdp_gathers_units(options, gathered, unreduced):
    found = devices("fsdp", replicas=2, **options)
    assert [(each.gathered, each.unreduced) for each in found] == [(gathered, unreduced)] * 2
    assert found[0].counted == 400 + 400 + 408 + found[0].activations + gathered + unreduced
    [alone] = devices("fsdp", replicas=1, **options)
    assert (alone.gathered, alone.unreduced) == (None, None)


def test_fsdp_peaks():
    """Activations reach their maximum before the gradients do. Only with `sync_every_pass` do
    sharded gradients exist when another accumulation step begins."""
    always = 400 + 408 + BUFFERS + BATCH * 8
    [one, _] = devices("fsdp", replicas=2)
    assert one.peak == always + 800 + 600 + 60 * 8  # gathered, unreduced
    [one, _] = devices("fsdp", replicas=2, accumulate=2)
    assert one.peak == always + 800 + 800 + max(60 * 4, 400 + TEMPORARY // 2)
    [one, _] = devices("fsdp", replicas=2, accumulate=2, sync_every_pass=True)
    assert one.peak == always + 800 + 600 + 400 + 60 * 4


def test_zero_2_keeps_all_units_gathered():
    [three, _], [two, _] = devices("fsdp", replicas=2), devices("fsdp", replicas=2, zero=2)
    assert (three.gathered, two.gathered) == (600 + 200, 600 + 200)  # one of two is prefetched
    units = tuple(Unit(f"{n}", 200) for n in range(3))
    weights = tuple(Weight(f"{n}.w", 2, 50, 200, True, 200, 200, 0) for n in range(3))
    many = replace(make("fsdp", replicas=2), shard_units=tuple(unit.name for unit in units))
    for zero, gathered in ((3, 400), (2, 600)):
        [one, _] = estimate(replace(many, zero=zero), replace(trial(), weights=weights))
        assert one.gathered == gathered


def test_shard_groups_share_the_shards():
    """2 groups of 2 shards: rank 2 has the same shard as rank 0."""
    assert kinds(devices("fsdp", replicas=4, shard_groups=2)) == [(400, 400, 408, 45 * 4)] * 4


def test_shards_of_a_grid():
    """Ranks 0 and 1 are the shards of replica 0. The trial has only the first shard. fsdp divides its
    rows between replicas: of 5 and 2 rows, the first replica has 3 and 1, and the second 2 and 1."""
    group = TensorGroup("", ("0",), "1", 150, kept=True)
    found = summary(tensor_plan=TensorPlan(2, (group,), parameters=200))
    first = Weight("0.weight", 5, 150, 600, True, 600, 600, 4)
    one = replace(trial(), weights=(first, *trial().weights[1:]))
    options = {"replicas": 2, "stages": 1, "shards": 2, "batch_size": 16}
    plain, sharded = (plan("hybrid", of=found, zero=zero, **options) for zero in (None, 3))
    assert [each[0] for each in kinds(estimate(plain, one))] == [P] * 4
    assert [each[0] for each in kinds(estimate(sharded, one))] == [
        360 + 100,
        360 + 100,
        240 + 100,
        240 + 100,
    ]
    assert [each.buckets for each in estimate(plain, one)] == [G] * 4  # gradients are summed flat


def test_owners():
    sizes = [1, 5, 3, 4]  # 5 to rank 0, 4 to rank 1, 3 to rank 1, 1 to rank 0
    assert owners([(0, size) for size in sizes], 2) == [0, 0, 1, 1]
    # The second group continues with 6 and 7 elements, and the frozen parameter has no owner.
    assert owners([(0, 1), (0, 5), (0, 3), (0, 4), (1, 9), (None, 99)], 2)[4] == 0


def test_zero_1_divides_optimizer_state_by_parameter():
    """Rank 0 updates layer 0, and rank 1 layer 1. Both have DDP's buckets."""
    found = devices("fsdp", replicas=2, zero=1)
    assert kinds(found) == [(P, G, 604, 45 * 8), (P, G, 204, 45 * 8)]
    assert [(each.buckets, each.gathered) for each in found] == [(G, None)] * 2
    assert found[0].peak == P + 604 + G + max(50 * 8, G + TEMPORARY // 2) + BUFFERS + BATCH * 8


@pytest.mark.parametrize(
    ("strategy", "options", "again", "activations"),
    [
        ("single", {}, [60], [60 * 16]),  # more than the forward pass's 45 n
        ("single", {}, [20], [45 * 16]),  # a small block at the start of a large model
        ("dp", {"replicas": 2}, [60], [60 * 8, 60 * 8]),
        # The stages keep 4 micro-batches of 4: 10 n and 35 n. One of them is recomputed.
        ("pipeline", {"micro_batches": 4}, [15, 50], [10 * 16 + 5 * 4, 35 * 16 + 15 * 4]),
        ("pipeline", {"micro_batches": 4, "schedule": "1f1b"}, [15, 50], [100, 200]),
    ],
)
def test_recomputed_blocks(strategy, options, again, activations):
    found = devices(strategy, again=again, **options)
    assert [each.activations for each in found] == activations


# Stage 0 has layer 0: 10 n. Stage 1 has layer 1 and the loss: 35 n.
FIRST, LAST = (600, 600, 604), (200, 200, 204)


@pytest.mark.parametrize(
    ("strategy", "options", "kept"),
    [
        ("mp", {}, [16, 16]),
        ("pipeline", {"micro_batches": 4}, [16, 16]),  # 4 micro-batches of 4 samples
        ("pipeline", {"micro_batches": 4, "accumulate": 2}, [8, 8]),
        ("pipeline", {"micro_batches": 4, "schedule": "gpipe"}, [16, 16]),
        ("pipeline", {"micro_batches": 4, "schedule": "1f1b"}, [8, 4]),  # at most `stages`
        ("pipeline", {"micro_batches": 3, "schedule": "gpipe"}, [18, 18]),  # 6 5 5, padded to 6
        ("hybrid", {"replicas": 2, "micro_batches": 2}, [8, 8, 8, 8]),
    ],
)
def test_stages_keep_micro_batches(strategy, options, kept):
    found = devices(strategy, **{"stages": 2} | options)
    sizes = [(*FIRST, 10 * n) if at % 2 == 0 else (*LAST, 35 * n) for at, n in enumerate(kept)]
    assert kinds(found) == sizes
    buckets = [600, 200] * 2 if strategy == "hybrid" else [None, None]
    assert [each.buckets for each in found] == buckets


def test_stages_on_one_device_add_up():
    [both] = devices("mp", placement="same")
    assert kinds([both]) == [(P, G, OPT, 10 * 16 + 35 * 16)]


def test_peaks():
    """The first backward pass creates the gradients (50 n). A later one, or one that writes into
    existing buckets, needs 60 n in addition to them."""
    always = P + OPT + BUFFERS + BATCH * 16
    [single], [again] = devices("single"), devices("single", accumulate=2)
    assert single.peak == always + max(50 * 16, G + TEMPORARY)
    assert again.peak == always + G + 60 * 8

    ranks = P + OPT + BUFFERS + BATCH * 8
    buckets, views = devices("ddp", replicas=2), devices("ddp", replicas=2, bucket_view=True)
    assert (buckets[0].buckets, buckets[0].peak) == (G, ranks + G + G + TEMPORARY)
    assert (views[0].buckets, views[0].peak) == (0, ranks + G + 60 * 8)
    assert [each.peak for each in devices("dp", replicas=2)] == [None, None]


def test_workspaces_count_in_the_peak_only():
    [without] = devices("single")
    [having] = estimate(make("single"), trial(workspace_bytes=1000))
    assert (having.peak - without.peak, having.counted - without.counted) == (1000, 0)


def test_sizes_between_and_beyond_the_passes_are_on_a_line():
    assert trial(sizes=(8, 16)).at(12, lambda each: each.first) == 50 * 12
    assert trial(sizes=(8, 16)).at(100, lambda each: each.first) == 50 * 100
    bent = MemoryTrial((), {}, (), tuple(Pass(n, 0, (), 0, 0, n * n, 0) for n in (2, 4, 6)), 0)
    assert bent.at(2, lambda each: each.first) == 4  # exact
    assert bent.at(3, lambda each: each.first) == 4 + 6  # between 2 and 4
    assert bent.at(8, lambda each: each.first) == 36 + 2 * 10  # beyond 4 and 6
    assert bent.at(1, lambda each: each.first) == 4 - 6


@pytest.mark.parametrize(
    ("strategy", "options", "sizes"),
    [
        ("single", {}, [16]),
        ("ddp", {"replicas": 3}, [4, 6]),  # 6 6 4
        ("dp", {"replicas": 3}, [4, 6, 16]),  # and the loss of all samples
        ("pipeline", {"micro_batches": 3, "stages": 2}, [5, 6]),  # 6 5 5
        ("pipeline", {"micro_batches": 3, "stages": 2, "schedule": "gpipe"}, [6]),  # padded
        # padded to a full batch's micro-batches, even if no batch is full
        ("pipeline", {"micro_batches": 4, "stages": 2, "schedule": "gpipe", "samples": 8}, [4]),
        ("single", {"samples": 10}, [10]),  # the data has fewer samples than the batch
    ],
)
def test_sizes_to_try(strategy, options, sizes):
    assert micro_batch_sizes(make(strategy, **options)) == sizes


@pytest.mark.parametrize(
    ("options", "kept", "average"),
    [
        ({}, 0, 2 * P),  # weighted copies, and their sum
        ({"outer_lr": 0.7}, P, 3 * P),  # keeps the last common parameters
        ({"outer_lr": 0.7, "outer_momentum": 0.9}, 2 * P, 4 * P),
    ],
)
def test_local_sgd_keeps_what_its_outer_optimizer_needs(options, kept, average):
    [one, _] = devices("local-sgd", replicas=2, **options)
    assert (one.optimizer, one.buckets) == (OPT + kept, None)
    assert one.counted == P + G + OPT + kept + 45 * 8
    assert one.peak == P + OPT + kept + G + average + BUFFERS + BATCH * 8


def test_compressed_gradients():
    """Layer 0 is a 6 × 25 matrix: two vectors of 6 and 25 numbers are smaller than half of it.
    Layer 1 is a 2 × 25 matrix, for which rank 1 is too much."""
    [plain, _] = devices("ddp", replicas=2)
    [cast, _] = devices("ddp", replicas=2, compress="bf16")
    assert cast == replace(plain, buckets=G + G // 2, peak=plain.peak + G // 2)
    thin = (6 + 25) * 4
    [power, _] = devices("ddp", replicas=2, compress="powersgd")
    assert (power.optimizer, power.counted) == (OPT + P + thin, plain.counted + P + thin)
    [two, _] = devices("ddp", replicas=2, compress="powersgd", powersgd_rank=3)
    assert two.optimizer == OPT + P  # 3 · 31 numbers are more than half of 150


@pytest.mark.parametrize(
    ("strategy", "options", "groups"),
    [
        ("ddp", {"replicas": 2}, 1),
        ("fsdp", {"replicas": 4, "shard_groups": 2}, 3),  # all, parts, and copies
        ("hybrid", {"replicas": 2, "stages": 2}, 2),  # one per stage
        ("hybrid", {"replicas": 2, "stages": 2, "schedule": "gpipe"}, 3),  # all, and two axes
    ],
)
def test_every_group_of_local_has_slots(strategy, options, groups):
    """Slots are outside of what a run counts and of the allocator, but a device must have room."""
    made = make(strategy, **options)
    measured = trial(cut=bool(made.stage_parts))
    without = estimate(made, measured)
    found = estimate(replace(made, staging_bytes=6), measured)
    assert found == tuple(replace(each, staging=6 * groups) for each in without)


def test_the_estimate_knows_every_strategy_and_option():
    """Whoever adds an option must decide how it affects memory, or refuse it in
    `find_unsupported`. Otherwise, plans with the option would silently get the estimate of plans
    without it."""
    in_estimate = "batch_size samples replicas stages schedule micro_batches accumulate placement"
    in_estimate += " precision bucket_mb bucket_view sync_every_pass device"
    in_estimate += " zero shard_groups recompute backend compress powersgd_rank sync_every outer_lr"
    in_estimate += " outer_momentum"
    hardly_matters = "workload seed loss_scale no_scaler static_graph find_unused steps epochs"
    hardly_matters += " mps threads_per_device prefix"
    known = set(in_estimate.split()) | set(hardly_matters.split())
    in_trial = {"shards", "sequence_parallel"}  # the trial has only the first shard
    assert {each.name for each in options_of(Request)} == known | in_trial | {"compile"}
    assert find_unsupported(replace(make("single"), compile=True))
    split = {"tensor_plan": TensorPlan(2, ()), "zero": 3, "precision": "bf16"}
    assert find_unsupported(replace(make("hybrid"), **split))
    plans = {strategy: replace(make("single"), strategy=strategy) for strategy in STRATEGIES}
    assert [name for name, plan in plans.items() if find_unsupported(plan)] == ["ep"]
    assert "new" in find_unsupported(replace(make("single"), strategy="new"))
