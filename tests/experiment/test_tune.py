"""Which configurations `tune` measures. Estimates and measurements are made up."""

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paralab.analyse.manifest import Pruned
from paralab.errors import UsageError
from paralab.experiment import candidates, configurations, tune
from paralab.experiment.candidates import Candidates
from paralab.experiment.compare import compare
from paralab.experiment.configurations import Configuration, all_configurations
from paralab.launch.inspect import Inspected
from paralab.plan.memory_trial import DeviceEstimate, MemoryEstimate
from paralab.plan.plan import label
from paralab.plan.request import STRATEGIES, Request
from paralab.record.folder import RunFolder
from paralab.workload.summary import Block
from tests.launch.fakes import MACHINE, SUMMARY

MODES = ("full", "selective")
INSPECTED = Inspected(MACHINE, replace(SUMMARY, blocks=(Block("0", MODES, False),)))


@pytest.fixture
def estimated(monkeypatch):
    """Each sample of a micro-batch needs 10 bytes, and with recomputation 5 or 2."""

    def estimate_all(plans, trials):
        asked.append(len(plans))
        return [MemoryEstimate(not_estimated="?") if p.compile else memory(p) for p in plans]

    def memory(plan):
        samples = max(rank.samples_per_step for rank in plan.ranks) // plan.accumulate
        each = {None: 10, "selective": 5, "full": 2}[plan.recompute]
        peak = samples * each
        return MemoryEstimate((DeviceEstimate(0, "cpu:0", 0, 0, 0, 0, 0, 0, 0, 0, peak),))

    asked = []
    monkeypatch.setattr(candidates, "estimate_all", estimate_all)
    return asked


def make(limit):
    return Candidates(INSPECTED, limit, batch_size=64)


def test_what_does_not_fit_is_pruned(estimated):
    """64 samples on one device need 640 bytes, on 2 devices 320, and on 4 devices 160."""
    four = [Request("ddp", replicas=n) for n in (2, 4)]
    found = make(300)
    assert found.admit([Request("single"), *four]) == [four[1]]
    assert {name: each.needed_bytes for name, each in found.pruned.items()} == {
        "single": 640,
        "ddp ×2": 320,
    }
    assert estimated == [3]
    assert make(None).admit([Request("single"), *four]) == [Request("single"), *four]
    assert estimated == [3]  # nothing to compare an estimate with


def test_what_cannot_run_is_listed(estimated):
    found = make(300)
    assert found.admit([Request("ddp", replicas=100), Request("ddp", replicas=4)]) == [
        Request("ddp", replicas=4)
    ]
    assert list(found.left_out) == ["ddp ×100"]


@pytest.mark.parametrize(
    ("limit", "saver"),
    [
        (320, {"accumulate": 2}),
        (319, {"accumulate": 4}),
        (159, {"recompute": "full"}),
        (127, {"recompute": "full", "accumulate": 4}),
    ],
)
def test_a_layout_that_does_not_fit_recomputes_or_accumulates(estimated, limit, saver):
    assert make(limit).admit([Request("single")], save=True) == [Request("single", **saver)]
    assert make(7).admit([Request("single")], save=True) == []


def test_what_the_user_gave_stays(estimated):
    given = Request("single", recompute="selective")
    assert make(100).admit([given], save=True) == [replace(given, accumulate=4)]


def test_what_has_no_estimate_is_measured(estimated):
    compiled = Request("single", compile=True)
    found = make(10)
    assert found.admit([compiled]) in ([compiled], [])  # [] if this machine has no compiler
    if not found.left_out:
        assert list(found.unknown) == ["single · compile"]


def test_names_mention_another_batch():
    assert make(None).name(Request("single", batch_size=128)) == "single · batch 128"
    assert make(None).name(Request("single", batch_size=64)) == "single"


def test_a_larger_batch_takes_fewer_steps():
    def steps(**options):
        return make(None).configure(Request("single", **options)).request.steps

    assert (steps(), steps(batch_size=32)) == (None, None)  # the default, 10 on a CPU
    assert (steps(batch_size=96), steps(batch_size=640)) == (6, 6)
    assert steps(batch_size=640, steps=9) == 9


def make_search(roots, times):
    search = tune._Search(None, make(None), roots, None, lambda line: None)
    search.times = {
        request: own if isinstance(own, list) else [own] for request, own in times.items()
    }
    return search


def test_a_search_in_which_nothing_fits_has_no_winner(monkeypatch, tmp_path):
    """The only layout without an estimate needed more memory than a device has. The answer was once
    "Keep dp ×2"."""
    root = Request("dp")
    search = tune._Search(RunFolder.create(tmp_path / "tune", ""), make(1), [root], None, print)
    search.budget = tune._Budget(0.0, None, None)
    monkeypatch.setattr(tune, "compare", lambda *_, **__: SimpleNamespace(failed=[], rows=[1]))

    def measure(rung, asked):
        search.candidates.pruned["dp ×2"] = Pruned(name="dp ×2", command="", needed_bytes=9)
        return {}

    monkeypatch.setattr(search, "_relative_times", measure)
    with pytest.raises(UsageError, match="fits in 1 B: dp ×2 needs the least"):
        search.measure("1 layout", [])


def test_promising_changes_are_combined():
    """bf16 is not a promising change, because it changes the training; accumulation looks
    slower."""
    root = Request("ddp", replicas=2)
    one, two, view = ({"bucket_mb": 1.0}, {"bucket_mb": 2.0}, {"bucket_view": True})
    times = {root: 1.0, replace(root, **one): 0.9, replace(root, **two): 0.8}
    times |= {replace(root, **view): 1.01, replace(root, precision="bf16"): 0.5}
    times |= {replace(root, accumulate=2): 1.2, replace(root, static_graph=True): 0.95}
    assert make_search([root], times).combine() == [
        replace(root, **two, **view, static_graph=True),
        replace(root, **view, static_graph=True),
        replace(root, **two, static_graph=True),
        replace(root, **two, **view),
    ]


def test_changes_are_relative_to_their_own_layout():
    """The pipeline is slower than the default. Its own changes are compared with it."""
    default, root = Request("ddp"), Request("pipeline")
    both = {"micro_batches": 8, "accumulate": 2}
    times = {default: 1.0, root: 2.0}
    times |= {replace(root, **{name: value}): 1.9 for name, value in both.items()}
    assert make_search([default, root], times).combine() == [replace(root, **both)]


def test_half_of_the_trials_are_for_the_final_rung():
    """Of 20 trials, 6 are layouts and 4 are changes (of 10). The other 10 are for the final rung,
    with 3 finalists and the default."""
    budget = tune._Budget(time.perf_counter(), 20, None)
    requests = [Request("ddp", replicas=n) for n in range(2, 12)]
    assert budget.limit(requests[:6]) == requests[:6]
    budget.spent = 6
    assert budget.is_left()
    assert budget.limit(requests) == requests[:4]
    assert budget.untried == 6
    budget.spent = 12
    assert not budget.is_left()
    assert budget.final_rounds(3) == 2
    assert tune._Budget(0.0, None, None).final_rounds(3) == tune.FINAL_ROUNDS
    assert not tune._Budget(time.perf_counter() - 31, None, 60.0).is_left()


class Rungs:
    """Replaces the measurements: each round takes the next of these times."""

    def __init__(self, search, times):
        self.search, self.left, self.asked = search, times, []
        search.budget, search.measure = tune._Budget(0.0, None, None), self.measure

    def measure(self, what, requests):
        self.asked.append(list(requests))
        for request in requests:
            self.search.times[request] += [self.left[request].pop(0)]


def test_one_slow_round_does_not_end_the_search_for_the_best():
    """tp is the fastest, but its first round was slow. After one round, fsdp is more than twice as
    slow as dp; after two, dp and ddp are clearly slower than tp."""
    ddp, dp, tp, fsdp = (Request(name) for name in ("ddp", "dp", "tp", "fsdp"))
    search = make_search([ddp, dp, tp, fsdp], {ddp: 1.0, dp: 0.8, tp: 1.1, fsdp: 1.7})
    search.default = ddp
    rungs = Rungs(search, {ddp: [1.0], dp: [0.81], tp: [0.5]})
    search.race(1)
    assert rungs.asked == [[dp, ddp, tp]]
    search.keep_best(2)
    assert search.roots == [tp, dp]


def test_low_precision_does_not_end_the_race_of_the_others():
    """bf16 is eight times as fast. That must not end the race between configurations in fp32."""
    ddp, tp, fsdp = (Request(name) for name in ("ddp", "tp", "fsdp"))
    low, lower = (Request("ddp", precision=name) for name in ("bf16", "fp16"))
    search = make_search([ddp], {ddp: 1.0, tp: 0.9, fsdp: 0.91, low: 0.125, lower: 0.2})
    search.default = ddp
    rungs = Rungs(search, {each: [1.0, 1.0] for each in (ddp, tp, fsdp, low, lower)})
    search.race(2)
    assert set(rungs.asked[0]) == {ddp, tp, fsdp, low, lower}


def test_finalists():
    """The two best, the best of another strategy, and the best in the fastest low precision."""
    ddp = Request("ddp")
    times = {ddp: 1.0, Request("tp"): 0.9, Request("fsdp"): 0.7}
    times |= {Request("ddp", bucket_mb=1.0): 0.6, Request("ddp", bucket_mb=2.0): 0.5}
    times |= {Request("ddp", precision="bf16"): 0.8, Request("single", precision="fp16"): 2.0}
    assert make_search([ddp], times).finalists() == [
        Request("ddp", bucket_mb=2.0),
        Request("ddp", bucket_mb=1.0),
        Request("fsdp"),
        Request("ddp", bucket_mb=2.0, precision="bf16"),
    ]


def test_a_slow_round_does_not_decide_about_the_finalists():
    ddp, tp, dp = Request("ddp"), Request("tp"), Request("dp")
    times = {ddp: [1.0] * 3, tp: [1.9, 0.5, 0.5], dp: [0.6, 0.6, 0.6]}
    assert make_search([ddp], times).finalists()[0] == tp


def test_the_layouts_to_search():
    def roots(base, devices, *names):
        return [label(each) for each in tune._roots(base, list(names), devices)]

    assert roots(Request("ddp", replicas=3), None, "ddp") == ["ddp ×3"]
    every = roots(Request("single"), 4, *STRATEGIES)
    assert every[0] == "ddp ×4"
    assert every[-1] == "single"
    assert {"fsdp ×4 · ZeRO-1", "pipeline · 4 stages · 1f1b", "hybrid ×2 · 2 stages"} <= set(every)
    assert len(set(every)) == len(every)
    fixed = roots(Request("single", stages=2), 4, *STRATEGIES)
    assert not {"mp · 4 stages", "hybrid ×2 · 1 stage · 2 shards"} & set(fixed)
    assert "hybrid ×2 · 2 stages" in fixed
    with pytest.raises(UsageError, match="3 devices"):
        roots(Request("hybrid"), 3, "hybrid")
    with pytest.raises(UsageError, match=r"ddp --replicas 2 .* 3 devices") as error:
        roots(Request("ddp", replicas=2), 3, "ddp")
    assert "leave out --replicas" in error.value.fix


@pytest.mark.parametrize("seconds", [-5.0, 0.0, math.nan])
def test_a_time_budget_is_positive(seconds):
    with pytest.raises(UsageError, match=f"--seconds {seconds:g}"):
        tune.tune(Request("single"), budget_seconds=seconds)


def test_each_round_needs_a_folder():
    """A list of 99999999999 rounds used all memory."""
    with pytest.raises(UsageError, match="99999999999 rounds"):
        compare([Configuration(Request("single"))], rounds=99999999999)


def test_compare_all_has_every_strategy_and_way_to_divide_it(monkeypatch):
    monkeypatch.setattr(configurations, "inspect_once", lambda *_, **__: INSPECTED)
    found = all_configurations(Request("single"))
    names = [each.label for each in found]
    assert len(set(names)) == len(names)
    assert all(each.optional for each in found)  # what cannot run is listed
    assert {each.request.strategy for each in found} == set(STRATEGIES)
    assert {each.request.zero for each in found} >= {1, 2}
    assert {each.request.schedule for each in found} >= {"gpipe", "1f1b", "zero-bubble"}
    assert "fsdp ×4 · 2 shard groups" in names
    assert "hybrid ×2 · 2 stages · 2 shards" in names
    assert not any(each.request.stages for each in found if each.request.strategy == "fsdp")
    # What does not depend on the strategy is tried once.
    assert [n for n in names if "recompute" in n] == [f"single · recompute {m}" for m in MODES]
    fixed = all_configurations(Request("single", precision="bf16"))
    assert {each.request.precision for each in fixed} == {"bf16"}


def test_a_comparison_checks_whether_a_batch_can_be_split(monkeypatch):
    """Without a `weight` for padded targets, ddp differs. `verify` named the loss as the reason, but
    `compare` blamed the samples, and called a lossy configuration proved."""
    asked = []

    def inspect_once(*_, **more):
        asked.append(more)
        return INSPECTED

    monkeypatch.setattr(configurations, "inspect_once", inspect_once)
    configurations.resolve_all([Configuration(Request("single"))])
    assert [more["verify"] for more in asked] == [True]
