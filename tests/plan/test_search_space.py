"""The layouts of a number of devices, and the changes of a configuration."""

from dataclasses import replace

import pytest

from paralab.plan.option import options_of
from paralab.plan.plan import label
from paralab.plan.request import STRATEGIES, Request
from paralab.plan.search_space import SAVERS, TUNED, changes, divided, layouts, splits
from paralab.workload.summary import Block
from tests.plan.test_resolve import summary

MODEL = summary(parameter_bytes=2**20, batch_size=32)


@pytest.mark.parametrize(
    ("devices", "axes", "ways"),
    [
        (1, 0, [()]),
        (1, 1, []),
        (4, 0, []),
        (4, 1, [(4,)]),
        (4, 2, [(2, 2)]),
        (8, 2, [(2, 4), (4, 2)]),
        (6, 3, [(1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1)]),
        (7, 3, []),  # only one axis can have 7 devices: ddp, pipeline, or tp
    ],
)
def test_splits(devices, axes, ways):
    assert splits(devices, axes) == ways


def labels(devices, *strategies):
    return [label(Request(**own)) for own in layouts(devices, strategies or STRATEGIES)]


def test_the_layouts_of_4_devices():
    """single is a layout of one device."""
    assert labels(1) == ["single"]
    assert [name for name in labels(4) if not name.startswith("hybrid")][:8] == [
        "dp ×4",
        "ddp ×4",
        "fsdp ×4",
        "tp · 4 shards",
        "cp · 4 shards",
        "ep · 4 shards",
        "mp · 4 stages",
        "pipeline · 4 stages",
    ]
    assert len(labels(8, "hybrid")) == 7
    assert labels(4, "hybrid") == [
        "hybrid ×1 · 2 stages · 2 shards",
        "hybrid ×2 · 1 stage · 2 shards",
        "hybrid ×2 · 2 stages",
    ]


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8, 12])
def test_each_layout_uses_all_devices_once(devices):
    found = layouts(devices, STRATEGIES)
    for own in found:
        product = 1
        for name, number in own.items():
            product *= 1 if name == "strategy" else number
        assert product == devices
    assert len({tuple(own.items()) for own in found}) == len(found)


def test_ways_to_divide_a_layout():
    assert [label(each) for each in divided(Request("fsdp", replicas=4))] == [
        "fsdp ×4",
        "fsdp ×4 · ZeRO-1",
        "fsdp ×4 · ZeRO-2",
    ]
    schedules = [each.schedule for each in divided(Request("pipeline", stages=2))]
    assert schedules == [None, "gpipe", "1f1b", "interleaved", "zero-bubble"]
    fixed = Request("pipeline", schedule="1f1b")
    assert divided(fixed) == [fixed]


def changed(base, **options):
    model = options.pop("model", MODEL)
    found = {}
    for each in changes(base, model, False, **options):
        [(name, value)] = [
            (name, value) for name, value in vars(each).items() if value != getattr(base, name)
        ]
        found.setdefault(name, []).append(value)
    return found


def test_changes():
    """1 MiB of parameters has buckets down to 0.05 MB. A model without blocks has none to recompute
    or to compile."""
    assert changed(Request("ddp", replicas=2)) == {
        "bucket_mb": [1.0, 0.5, 0.25, 0.12, 0.06],
        "accumulate": [2, 4],
        "bucket_view": [True],
        "static_graph": [True],
        "precision": ["bf16"],
    }
    assert changed(Request("single", accumulate=2, precision="bf16")) == {}
    assert changed(Request("fsdp", replicas=8), any_batch=True) == {
        "accumulate": [2, 4],
        "batch_size": [64, 128, 256],
        "zero": [1, 2],  # 3 is usual
        "shard_groups": [2, 4],
        "precision": ["bf16"],
    }
    assert changed(Request("pipeline", stages=4, schedule="interleaved"))["micro_batches"] == [
        4,
        8,
        16,
    ]


def test_changes_of_blocks():
    blocks = (Block("0", ("full",), False), Block("1", ("full", "selective"), False))
    found = changed(Request("single"), model=replace(MODEL, blocks=blocks))
    assert found["recompute"] == ["selective", "full"]
    assert found["compile"] == [True]
    assert "compile" not in changed(Request("tp"), model=replace(MODEL, blocks=blocks))


def test_tune_knows_every_option():
    """Someone who adds an option must decide whether `tune` searches it. Lossy options are never
    searched: they would win by training something else."""
    fixed = "workload samples seed steps epochs device backend mps threads_per_device prefix"
    fixed += " placement loss_scale no_scaler find_unused sync_every_pass"
    fixed += " compress powersgd_rank sync_every outer_lr outer_momentum"
    axes = {each.name for each in options_of(Request) if each.axis}
    known = {each.name for each in options_of(Request)}
    assert known == {*TUNED, *fixed.split(), *axes}
    assert {name for way in SAVERS for name in way} <= set(TUNED)
