"""Every option is defined once, on a field of `Request`, and everything derived from it agrees."""

from dataclasses import fields

import pytest

from paralab.plan.option import options_of, to_words
from paralab.plan.plan import label
from paralab.plan.request import APPLIES, STRATEGIES, Request
from tests.plan.test_resolve import plan

OPTIONS = {option.name: option for option in options_of(Request)}


def test_every_field_but_the_strategy_is_an_option_with_help():
    assert [field.name for field in fields(Request)] == ["strategy", *OPTIONS]
    for option in OPTIONS.values():
        assert option.help.endswith("."), option.name
        assert option.heading, option.name


def test_an_option_applies_to_strategies_that_exist():
    for name, strategies in APPLIES.items():
        assert set(strategies) < set(STRATEGIES), name


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("single", {}, "single"),
        ("ddp", {}, "ddp ×2"),
        ("ddp", {"replicas": 1, "accumulate": 1, "precision": "fp32"}, "ddp ×1"),
        ("ddp", {"accumulate": 4, "precision": "bf16"}, "ddp ×2 · accumulate 4 · bf16"),
        ("ddp", {"bucket_mb": 0.5, "static_graph": True}, "ddp ×2 · bucket 0.5 MB · static graph"),
        ("mp", {"placement": "same"}, "mp · 2 stages · same device"),
        ("mp", {"placement": "spread", "stages": 1}, "mp · 1 stage"),
        ("fsdp", {"zero": 2}, "fsdp ×2 · ZeRO-2"),
        ("fsdp", {"zero": 3, "replicas": 4, "shard_groups": 2}, "fsdp ×4 · 2 shard groups"),
        ("dp", {"recompute": "full", "precision": "bf16"}, "dp ×2 · recompute full · bf16"),
        ("hybrid", {"schedule": "1f1b"}, "hybrid ×2 · 2 stages · 1f1b"),
        ("pipeline", {"micro_batches": 3}, "pipeline · 2 stages · 3 micro-batches"),
        ("single", {"seed": 3, "steps": 7, "batch_size": 8}, "single"),
    ],
)
def test_the_label_names_what_is_unusual(strategy, options, expected):
    assert label(Request(strategy, **options)) == expected


def test_a_plan_has_the_label_of_the_request_that_leaves_nothing_open():
    assert label(plan("hybrid")) == "hybrid ×2 · 2 stages · 4 micro-batches"
    assert label(plan("ddp", precision="fp16", no_scaler=True)) == "ddp ×2 · fp16 · no scaler"
    assert label(plan("single")) == "single"


def test_words_name_only_what_was_given_to_the_last_digit():
    assert to_words(Request("ddp")) == []
    assert to_words(Request("ddp", loss_scale=1234567.0)) == ["--loss-scale", "1234567.0"]
    assert to_words(Request("ddp", bucket_mb=0.1)) == ["--bucket-mb", "0.1"]
    assert to_words(Request("ddp", static_graph=True, seed=7)) == [
        "--seed",
        "7",
        "--static-graph",
    ]
