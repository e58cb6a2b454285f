"""The plan of expert parallelism."""

import json
from dataclasses import replace

import pytest

from paralab.errors import UsageError
from paralab.machine.precision import Probe
from paralab.plan.check import check
from paralab.plan.expert_plan import NO_LAYERS, NOT_ADDITIVE, layer_table, uneven, without_proof
from paralab.plan.grid import Place
from paralab.plan.layout import count_launched
from paralab.plan.plan import Plan, label
from paralab.plan.request import Request
from paralab.plan.resolve import resolve
from paralab.workload.expert_plan import ExpertLayer, ExpertPlan
from tests.plan.test_resolve import CPU, summary

PROVED = ExpertPlan(
    2,
    (
        ExpertLayer("a.0", 8, 2, 4000),
        ExpertLayer("a.1", 8, 2, 4000),
        ExpertLayer("b.0", 3, 1, 900, reason="the 3 experts cannot be divided"),
    ),
)


def ep(plan, **options):
    request = Request("ep", **options)
    return resolve(request, CPU, summary(expert_plan=plan), lambda name: Probe(True, "tried"), None)


def test_each_rank_must_get_as_many_experts():
    assert uneven("a", 8, 4) is None
    assert "among 2 or 4 or 8" in uneven("a", 8, 3)
    assert "among 3" in uneven("a", 3, 2)


def test_no_rank_starts_if_there_is_nothing_to_prove():
    assert "no expert layer" in without_proof({}, 2).problem
    assert "3 experts of a" in without_proof({"a": 3}, 2).problem
    assert without_proof({"a": 3, "b": 4}, 2) is None


def test_the_plan_has_every_number():
    plan = ep(PROVED, shards=2, batch_size=11)
    assert [rank.samples_per_step for rank in plan.ranks] == [6, 5]
    assert plan.arithmetic == "11 = 6 + 5 samples on 2 ranks"
    assert label(plan) == "ep · 2 shards"
    [axis] = plan.axes
    assert (axis.groups, axis.collectives) == (((0, 1),), ("all_to_all", "all_reduce"))
    reasons = {reason.choice: reason for reason in plan.reasons}
    assert reasons["experts per rank"].value == "4 + 4"
    assert reasons["all-to-alls"].value == "6 forward, 4 backward"
    assert "8.0 k parameters" in reasons["divided layers"].because
    assert any("2 of 3 layers" in remark for remark in plan.remarks)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert [(row.layer, row.layers, row.divided) for row in layer_table(PROVED)] == [
        ("a.*", 2, True),
        ("b.*", 1, False),
    ]


def test_the_launched_ranks_are_the_shards():
    places = [Place("node", rank, (), 1.0) for rank in range(4)]
    assert count_launched(Request("ep"), places) == Request("ep", shards=4)
    assert count_launched(Request("ep", shards=2), places).shards == 2


@pytest.mark.parametrize(
    ("problem", "fix"), [(NO_LAYERS, "moe"), (NOT_ADDITIVE, "each token"), ("differs", "--shards")]
)
def test_a_model_that_cannot_be_divided_is_refused(problem, fix):
    with pytest.raises(UsageError, match=problem) as refused:
        ep(replace(PROVED, problem=problem), shards=2)
    assert fix in (refused.value.fix or "")


@pytest.mark.parametrize(
    "options", [{"compile": True}, {"compress": "bf16"}, {"replicas": 2}, {"zero": 2}]
)
def test_options_of_other_strategies_are_refused(options):
    with pytest.raises(UsageError, match="ep has no option"):
        check(Request("ep", **options))


def test_what_needs_whole_parameters_is_refused():
    for given in ({"read_by_loss": ("w",)}, {"hooked": ("w",)}):
        both = summary(expert_plan=PROVED, **given)
        with pytest.raises(UsageError, match="'w'"):
            resolve(Request("ep"), CPU, both, lambda name: Probe(True, "tried"), None)
