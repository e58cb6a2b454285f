"""Lossy options: what is refused, and what a proof of a few steps covers."""

import pytest

from paralab.errors import UsageError
from paralab.plan.lossy import Lossy, Simulation, provable, rounds_in_any_order, simulation_of
from paralab.plan.plan import Plan, label
from paralab.plan.request import Request
from tests.plan.test_resolve import plan, summary


@pytest.mark.parametrize(
    ("strategy", "options", "flag"),
    [
        ("single", {"compress": "bf16"}, "--compress"),
        ("ddp", {"compress": "bf16", "replicas": 1}, "--replicas 2"),
        ("ddp", {"compress": "bf16", "accumulate": 2, "sync_every_pass": True}, "leave out"),
        ("ddp", {"compress": "fp16", "compile": True}, "leave out"),
        ("ddp", {"compress": "powersgd", "precision": "fp16"}, "--compress fp16"),
        ("ddp", {"powersgd_rank": 2}, "--compress powersgd"),
        ("ddp", {"compress": "bf16", "powersgd_rank": 2}, "--compress powersgd"),
        ("ddp", {"sync_every": 2}, "--sync-every"),
        ("local-sgd", {"replicas": 1}, "--replicas 2"),
        ("local-sgd", {"outer_momentum": 1.0}, "--outer-momentum"),
        ("local-sgd", {"outer_lr": 0.0}, "--outer-lr"),
    ],
)
def test_what_cannot_work_is_refused(strategy, options, flag):
    with pytest.raises(UsageError) as refused:
        plan(strategy, **options)
    assert flag in refused.value.fix


@pytest.mark.parametrize(
    ("strategy", "options", "what"),
    [
        ("ddp", {"compress": "powersgd"}, "scalars"),
        ("ddp", {"compress": "bf16"}, "imaginary"),  # a cast would drop the imaginary part
        ("ddp", {"compress": "bf16"}, "sparse"),
        ("local-sgd", {}, "imaginary"),
        ("local-sgd", {}, "sparse"),
    ],
)
def test_parameters_that_an_algorithm_would_change_wrongly_are_refused(strategy, options, what):
    with pytest.raises(UsageError) as refused:
        plan(strategy, of=summary(**{what: ("0.weight",)}), **options)
    assert "'0.weight'" in refused.value.problem


def test_a_plan_says_what_it_loses_and_reads_itself_back():
    given = plan("local-sgd", replicas=3, accumulate=2, outer_lr=0.7, outer_momentum=0.9)
    assert given.lossy == Lossy(sync_every=10, outer_lr=0.7, outer_momentum=0.9)
    assert label(given) == (
        "local-sgd ×3 · accumulate 2 · sync every 10 · outer lr 0.7 · outer momentum 0.9"
    )
    assert len(given.differences) == 1
    assert [axis.name for axis in given.axes] == ["replicas"]
    simulation = simulation_of(given)
    assert simulation == Simulation(None, 1, 10, 0.7, 0.9, replicas=3, accumulate=2)
    assert Plan.from_json(given.to_json()) == given
    assert simulation_of(plan("ddp")) is None
    assert not plan("ddp").differences


def test_averages_come_every_few_steps_and_at_the_end():
    steps = range(7)
    assert [step for step in steps if Lossy(sync_every=3).synchronizes(step, 7)] == [2, 5, 6]
    assert [step for step in steps if Lossy(sync_every=9).synchronizes(step, 7)] == [6]


@pytest.mark.parametrize(
    ("options", "steps", "every"),
    [({"sync_every": 2}, 4, 2), ({"sync_every": 500}, 4, 3), ({}, 3, 2), ({"steps": 1}, 1, 1)],
)
def test_a_proof_has_a_regular_and_a_final_average(options, steps, every):
    request = provable(Request("local-sgd", **options), steps)
    steps = request.steps or steps
    assert request.sync_every == every
    averages = [s for s in range(steps) if Lossy(sync_every=every).synchronizes(s, steps)]
    assert len(averages) >= 2


def test_a_proof_of_powersgd_feeds_back_an_error():
    assert provable(Request("ddp", compress="powersgd", steps=3), 3).steps == 4
    assert provable(Request("ddp", compress="powersgd", steps=9), 9).steps == 9
    assert provable(Request("ddp", compress="bf16", steps=1), 1).steps == 1


def test_only_local_adds_rounded_gradients_in_rank_order():
    assert not rounds_in_any_order(plan("ddp"))
    assert rounds_in_any_order(plan("ddp", compress="bf16", backend="gloo"))
    assert not rounds_in_any_order(plan("ddp", compress="powersgd", backend="gloo"))
