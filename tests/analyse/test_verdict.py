"""The verdict follows the numbers: different numbers give different sentences."""

import copy
import dataclasses
import json
import re

import msgspec
import pytest
from msgspec.structs import replace

from paralab.analyse.compare import (
    Comparison,
    SpeedUp,
    _with_break_even,
    comparison_of,
    comparison_of_runs,
    loss_difference,
)
from paralab.analyse.confidence import speed_up
from paralab.analyse.judge import judge as judge_ranks
from paralab.analyse.manifest import Pruned, SearchNotes
from paralab.analyse.metric_types import Bubble, StepShares
from paralab.analyse.phrases import compile_cost
from paralab.analyse.report import report, same_training
from paralab.analyse.result import Compilation, Spread
from paralab.analyse.scaling import findings as scaling_findings
from paralab.analyse.scaling import losses_of
from paralab.analyse.time_tables import KINDS, where_time_goes
from paralab.analyse.tune import Tuned, TuneResult, _measured_section, _rate, _tuned
from paralab.analyse.tune import findings as tuned_findings
from paralab.analyse.verdict import _next, _parts, tune_command, verdict
from paralab.errors import UsageError
from paralab.plan.request import Request
from paralab.record.events import Verify
from paralab.units import whole_percents
from tests.analyse.recordings import plan, write
from tests.analyse.test_metrics import one_is_slow, two_buckets
from tests.analyse.test_verify import EQUAL, lossy
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    alone = [
        ("forward", 0, 5, {"device": "cpu:0", "accumulation": 0}),
        ("backward", 5, 9, {"device": "cpu:0", "accumulation": 0}),
    ]
    write(root / "single", plan("single", ranks=1, workload="mlp", seed=0), lambda rank: alone)
    write(root / "ddp", plan(workload="mlp", seed=0), two_buckets)
    write(root / "late", plan(workload="mlp", seed=0), one_is_slow)
    return root


@pytest.fixture
def compared(folders):
    """single and ddp as if measured in five rounds; tests change the numbers."""
    return comparison_of_runs([folders / "single", folders / "ddp"]).to_dict() | {"rounds": 5}


def judge(compared):
    return verdict(typed(compared))


def typed(compared):
    return msgspec.convert(compared, Comparison)


def timed(comparison, *steps):
    """Give every row these step times in five rounds, a little noisy."""
    rows = comparison["rows"]
    for row, step in zip(rows, steps, strict=True):
        row["step_seconds"] = {"median": step, "p10": step, "p90": step}
        row["round_seconds"] = [step * noise for noise in (1.0, 1.01, 0.99, 1.005, 0.995)]
        row["round_seconds_per_sample"] = [
            seconds / row["samples_per_step"] for seconds in row["round_seconds"]
        ]
        ratio = speed_up(rows[0]["round_seconds_per_sample"], row["round_seconds_per_sample"])
        row["speed_up"] = ratio.to_dict() | {
            "verdict": "baseline" if row is rows[0] else ratio.verdict
        }
        row["efficiency"] = ratio.value / row["devices"]
    return comparison


def text(findings, kind):
    return " ".join(finding.text for finding in findings if finding.kind == kind)


def test_what_is_fastest_depends_on_the_numbers(compared):
    def fastest(*steps):
        [finding] = [f for f in judge(timed(compared, *steps)) if f.kind == "fastest"]
        return finding.text.partition("`")[2].partition("`")[0]

    assert fastest(0.1, 0.06) == "ddp ×2"
    assert fastest(0.1, 0.2) == "single"
    assert fastest(0.1, 0.0999) == "single"
    equal = judge(timed(compared, 0.1, 0.0999))
    assert not text(equal, "limit"), "a difference within the noise is not explained"
    slow = text(judge(timed(compared, 0.1, 0.2)), "limit")
    assert "2 devices" in slow
    assert "50 ms" in slow  # a perfect split
    assert "200 ms" in slow


def test_a_baseline_is_not_compared_with_itself(compared):
    """A parallel baseline once seemed to lose almost nothing, because it was compared with
    itself."""
    compared |= {"rows": [compared["rows"][1], copy.deepcopy(compared["rows"][1])]}
    compared["rows"][1]["name"] = "another"
    compared["baseline"] = "ddp ×2"
    found = judge(timed(compared, 0.1, 0.2))
    [limit] = [finding for finding in found if finding.kind == "limit"]
    assert limit.evidence.keys() == {"shares"}
    assert text(found, "cost").count("ddp ×2") == 1


def test_one_round_is_not_called_sure(folders):
    found = verdict(comparison_of_runs([folders / "single", folders / "ddp"]))
    [fastest] = [finding for finding in found if finding.kind == "fastest"]
    assert fastest.evidence["speed_up"]["low"] is None
    assert "is fastest" not in fastest.text


def test_a_larger_batch_is_not_held_against_a_smaller_ones_step(compared):
    """Twice the batch on two devices in the same time is perfect scaling."""
    rows = compared["rows"]
    rows[1] |= {"batch": rows[1]["batch"] | {"size": 128}, "samples_per_step": 128}
    found = judge(timed(compared, 0.1, 0.1))
    assert "2.00 times as fast" in text(found, "fastest")
    [limit] = [finding for finding in found if finding.kind == "limit"]
    assert limit.evidence["step_seconds"] == pytest.approx(limit.evidence["perfect_seconds"])
    assert limit.text.count("100 ms") == 2


def test_a_batch_larger_than_an_epoch_is_no_more_work(compared):
    """`scale --weak` doubled the batch of 64 on two devices, but an epoch had 64 samples. So a
    perfect step takes half the time, not the same time."""
    rows = compared["rows"]
    rows[1]["batch"] = rows[1]["batch"] | {"size": 128}
    found = judge(timed(compared, 0.1, 0.1))
    assert not [finding for finding in found if finding.kind == "limit"]  # equally fast
    [limit] = [f for f in judge(timed(compared, 0.1, 0.2)) if f.kind == "limit"]
    assert limit.evidence["perfect_seconds"] == pytest.approx(0.05)


def test_what_is_lost_adds_up_to_what_is_missing(compared):
    rows = typed(timed(compared, 10.0, 10.0)).rows
    lost = losses_of(rows[1], rows[0])
    assert lost["exposed communication"] == pytest.approx(3)
    assert sum(lost.values()) == pytest.approx(5)  # a perfect step takes 5 s
    assert losses_of(rows[1], rows[1])["exposed communication"] == 0, (
        "against itself nothing is lost"
    )


def test_a_failed_set_up_is_told_also_if_only_one_is_left(compared):
    failed = dict.fromkeys(("name", "command", "error"), "no luck")
    failed |= {"request": {"strategy": "ddp"}, "runs": []}
    compared |= {"rows": compared["rows"][:1], "failed": [failed]}
    assert "no luck" in text(judge(compared), "warning")
    compared |= {"rows": [], "failed": [failed, failed], "baseline": None}
    assert text(judge(compared), "warning").count("failed: no luck") == 2
    assert scaling_findings(typed(compared)) == ()


def test_a_lossy_configuration_is_not_the_fastest_and_not_equal(compared):
    found = typed(timed(compared, 0.1, 0.05))
    row = replace(found.rows[1], request=Request("ddp", compress="bf16"), verify=lossy())
    findings = verdict(replace(found, rows=[found.rows[0], row]))
    [fastest] = [each for each in findings if each.kind == "fastest"]
    assert fastest.evidence["speed_up"]["value"] == 1.0
    [told] = [each for each in findings if each.kind == "lossy"]
    assert told.evidence["speed_up"]["value"] == pytest.approx(2.0)
    assert told.evidence["difference"] == 3e-4
    [same] = [each for each in findings if each.kind == "same"]
    assert (same.evidence["equal"], same.evidence["of"]) == (0, 1)
    assert not text(findings, "warning")
    assert same_training(row) == "as simulated, weights differ by 3e-04 from single"


def test_losses_that_are_not_finite_are_not_called_equal(compared):
    row = replace(typed(compared).rows[1], verify=judge_ranks("fp64", [Verify(**EQUAL)] * 2))
    assert same_training(row) == "equal"
    assert same_training(replace(row, not_finite_losses=3)).startswith("equal, but 3 losses")
    assert loss_difference([1.0, None], [1.0, 0.9]) is None
    assert loss_difference([1.0, 1.1], [1.0, 1.0]) == pytest.approx(0.1)
    assert loss_difference([1.0], [1.0, 1.0]) == 0.0


def test_a_straggler_must_be_named_by_most_rounds(folders, tmp_path):
    def experiment(runs):
        entry = {"name": "ddp", "command": "", "request": {"strategy": "ddp"}}
        entry["runs"] = [str(folders / run) for run in runs]
        first = json.loads((folders / "ddp" / "manifest.json").read_text())
        manifest = {
            "kind": "compare",
            "about": {},
            "left_out": [],
            "configurations": [entry],
        }
        (tmp_path / "manifest.json").write_text(json.dumps(first | manifest))
        return comparison_of(tmp_path)["rows"][0]["metrics"]["straggler"]

    assert experiment(["late", "ddp", "ddp"]) is None
    assert experiment(["late", "late", "ddp"])["rank"] == 1


def test_tune_names_the_baseline(folders, tmp_path):
    """Elsewhere it is `single`. If the named configuration failed, there is no comparison."""

    def baseline(name):
        runs = {"single": "single", "ddp": "ddp"}
        entries = [
            {"name": n, "command": "", "request": {"strategy": n}, "runs": [str(folders / run)]}
            for n, run in runs.items()
        ]
        first = json.loads((folders / "ddp" / "manifest.json").read_text())
        manifest = {"kind": "compare", "configurations": entries, "baseline": name}
        (tmp_path / "manifest.json").write_text(json.dumps(first | manifest))
        found = comparison_of(tmp_path)
        return found.baseline, [row.ratio.verdict for row in found.rows].count("baseline")

    assert baseline(None) == ("single", 1)
    assert baseline("ddp") == ("ddp", 1)
    assert baseline("tp") == (None, 0)


def test_runs_in_folders_of_one_name_keep_different_names(tmp_path):
    folders = [write(tmp_path / place / "run", plan(), two_buckets) for place in ("a", "b")]
    names = [row.name for row in comparison_of_runs(folders).rows]
    assert names == [f"ddp ×2 ({folder})" for folder in folders]


def test_runs_of_different_workloads_are_not_compared(folders, tmp_path):
    write(
        tmp_path / "other",
        plan("single", ranks=1, workload="gpt"),
        lambda rank: [],
        workload={"name": "gpt"},
    )
    with pytest.raises(UsageError, match="different workloads: mlp, gpt"):
        comparison_of_runs([folders / "single", tmp_path / "other"])


def test_a_run_without_a_finished_step_is_a_row_with_its_error(folders, tmp_path):
    write(tmp_path / "dead", plan(workload="mlp"), two_buckets, steps=0)
    found = comparison_of_runs([folders / "single", tmp_path / "dead"])
    assert "no step" in found.failed[0].error
    assert found.failed[0].error in text(report(found, tmp_path).findings, "warning")


def test_the_suggested_search_is_of_the_same_training(compared):
    asked = Request(
        "ddp", workload="my model.py:f", replicas=3, batch_size=60, precision="bf16", seed=0
    )
    row = replace(typed(compared).rows[1], request=asked)
    assert (
        tune_command(row)
        == "paralab tune ddp --workload 'my model.py:f' --replicas 3 --batch-size 60 --precision bf16"
    )


def test_a_verdict_and_a_chart_round_alike(compared):
    """The sentence once said 18% skew and 27% compute, but the chart said 19% and 6% + 20%."""
    shares = StepShares(
        forward=0.0625,
        backward=0.205,
        optimizer=0.077,
        exposed_communication=0.0866,
        waiting=0.1116,
        other=0.2713,
        skew=0.186,
    )
    row = typed(compared).rows[1]
    row = replace(row, metrics=replace(row.metrics, shares=shares))
    drawn = whole_percents([shares[field] for field in KINDS])
    assert drawn[0] + drawn[1] == 26
    [first, *_] = re.findall(r"(\d+)% compute", _parts(row).text)
    assert int(first) == 26
    assert f"{drawn[-1]}% skew" in _parts(row).text


def test_shards_are_not_advised_to_change_their_buckets(compared):
    """The advice once called 37 sums of activations buckets, whose size `tune hybrid` could
    change."""
    row = typed(compared).rows[1]
    metrics = replace(row.metrics, exposed_share=0.3, communication_share=0.3)
    ranks = [replace(rank, shard=number) for number, rank in enumerate(row.ranks)]

    def suggested(row):
        return [
            f.text
            for f in _next(replace(row, metrics=metrics), [row])
            if f.evidence.get("exposed_share")
        ]

    assert "paralab tune ddp" in suggested(row)[0]
    [text] = suggested(replace(row, ranks=ranks))
    assert "paralab tune --devices 2 --workload mlp" in text
    assert "bucket" not in text


def test_the_table_has_only_the_longest_collectives(compared):
    """tp has dozens per step."""
    row = typed(compared).rows[1]
    [first, *_] = row.metrics.buckets
    buckets = [
        replace(first, bucket=number, transfer_seconds=float(number)) for number in range(40)
    ]
    many = replace(row, metrics=replace(row.metrics, buckets=buckets))
    section = where_time_goes([many])
    [shown] = [block for block in section.blocks if "bucket" in getattr(block, "columns", ())]
    assert [cells[0].value for cells in shown.rows] == list(range(28, 40))


def test_each_phase_of_a_search_is_compared_with_the_default(folders, tmp_path):
    """The first phase, which chooses the default, was once compared with `single`."""
    first = json.loads((folders / "ddp" / "manifest.json").read_text())
    entries = [
        {"name": n, "command": "", "request": {"strategy": n}, "runs": [str(folders / n)]}
        for n in ("single", "ddp")
    ]
    for rung, baseline in (("rung1", None), ("rung2", "ddp")):
        (tmp_path / rung).mkdir()
        manifest = {"kind": "compare", "configurations": entries, "baseline": baseline}
        (tmp_path / rung / "manifest.json").write_text(json.dumps(first | manifest))
    [table] = _measured_section(tmp_path, "ddp").blocks
    column = table.columns.index("speed-up")
    ratios = {(cells[0].value, cells[1].text): cells[column].value for cells in table.rows}
    assert ratios[1, "ddp"] == ratios[2, "ddp"] == 1
    assert ratios[1, "single"] == ratios[2, "single"]


def test_tuning_says_when_the_default_is_best():
    def tuned(name, step):
        return Tuned(
            name=name,
            command=f"paralab run {name}",
            batch_size=32,
            round_seconds_per_sample=[step / 32],
            samples_per_second=1.0,  # over the whole run, with a first step that compiles
            step_seconds=Spread(median=step, p10=step, p90=step),
            speed_up=SpeedUp(value=1.2, low=1.1, high=1.3, verdict="faster"),
            precision="fp32",
            loss_difference=0.0,
            verify=None,
            peak_bytes=[],
            exposed_seconds=None,
        )

    default, better = tuned("ddp", 0.1), tuned("ddp --bucket-mb 4", 0.08)
    choice = TuneResult(
        kind="tune",
        default=default,
        chosen=default,
        best_is_default=True,
        low_precision=None,
        curve=[],
        rungs=[],
        run_folder="",
    )
    [finding] = tuned_findings(choice)
    assert "paralab run" not in finding.text
    [finding] = tuned_findings(replace(choice, chosen=better, best_is_default=False))
    assert "1.20 times as fast (1.10–1.30)" in finding.text
    assert "paralab run ddp --bucket-mb 4" in finding.text

    larger = replace(better, batch_size=64, round_seconds_per_sample=[0.08 / 64])
    [finding] = tuned_findings(replace(choice, chosen=larger, best_is_default=False))
    assert "64" in finding.text
    assert "800" in finding.text
    assert not re.search(r"\bms\b", finding.text)  # steps of different batches are not compared

    notes = SearchNotes(considered=9, pruned=(Pruned(name="tp", command="", needed_bytes=2**31),))
    limited = replace(choice, device_bytes=2**30, search=notes, runners_up=(better,))
    limited = replace(limited, margin=SpeedUp(value=0.8, low=0.7, high=1.3, verdict="too noisy"))
    found = {finding.kind: finding for finding in tuned_findings(limited)}
    assert found["pruned"].evidence == {"pruned": 1, "considered": 9, "not_estimated": 0}
    assert found["margin"].evidence["runners_up"] == [better.name]
    assert f"`{better.name}` (400 samples/s)" in found["margin"].text


def test_a_large_but_unsure_speed_up_does_not_hide_a_sure_one(compared):
    """The row with the largest estimate may be the noisiest. The fastest row is one that is
    certain."""
    rows = timed(compared, 0.1, 0.07)["rows"]
    wild = copy.deepcopy(rows[1]) | {
        "name": "wild",
        "round_seconds_per_sample": [s / 64 for s in (0.01, 0.2, 0.02, 0.3, 0.05)],
    }
    ratio = speed_up(rows[0]["round_seconds_per_sample"], wild["round_seconds_per_sample"])
    wild["speed_up"] = ratio.to_dict() | {"verdict": ratio.verdict}
    assert ratio.value > 1.5
    assert ratio.verdict == "too noisy"
    compared["rows"].append(wild)
    assert text(judge(compared), "fastest").startswith("`ddp ×2`")


@pytest.mark.parametrize(
    ("noise", "steps", "words"),
    [(0.01, 50, "after 50 steps"), (0.5, None, "unknown: too noisy"), (None, None, "not pay off")],
)
def test_compiling_pays_off_only_if_it_is_faster(compared, noise, steps, words):
    """`compare --all` said that compiling pays off after 569 steps, because one noisy round of the
    compiled configuration was faster."""
    made = typed(timed(compared, 0.1, 0.1)).rows[0]
    eager = replace(made, request=dataclasses.replace(made.request, compile=None))
    ways = (-1, 1, 0, 0.5, -0.5)
    rounds = [0.08 * (1 + way * (noise or 0.0)) / 64 for way in ways] if noise else [0.1 / 64] * 5
    made = replace(
        made,
        name="compiled",
        request=dataclasses.replace(eager.request, compile=True),
        step_seconds=Spread(median=0.08, p10=0.08, p90=0.08),
        round_seconds_per_sample=rounds,
        compilation=Compilation(
            graphs=1, calls=1, eager_calls=0, first_step_seconds=1.08, extra_seconds=1.0
        ),
    )
    cost = _with_break_even(made, [eager, made]).compilation
    assert cost.break_even_steps == steps
    assert words in compile_cost(cost)


def test_configurations_that_differ_for_the_same_reason_are_listed_together(compared):
    """A loss that cannot be split gave 24 equal warnings."""
    rows = typed(timed(without_data(compared), 0.1, 0.2)).rows
    wrong = judge_ranks("fp64", [Verify(**EQUAL | {"losses": [2.0, 1.0]})], "a sum")
    wrong = replace(wrong, equal=False, cause="a sum")
    differing = [replace(rows[1], name=name, verify=wrong) for name in ("a", "b")]
    found = verdict(replace(typed(compared), rows=[rows[0], *differing]))
    [warning] = [finding for finding in found if finding.kind == "warning"]
    assert list(warning.evidence["max_differences"]) == ["a", "b"]
    assert "`a`, `b` differ from" in warning.text


@pytest.mark.parametrize(
    ("strategy", "measured", "words"),
    [
        ("mp", 0.51, "`pipeline`'s micro-batches."),  # mp has no --micro-batches
        ("pipeline", 0.21, "more `--micro-batches`."),  # balanced stages cannot do better
        ("pipeline", 0.4, "more balanced stages"),
    ],
)
def test_advice_about_idle_stages(compared, strategy, measured, words):
    row = typed(timed(compared, 0.1, 0.1)).rows[1]
    metrics = replace(row.metrics, bubble=Bubble(measured=measured, ideal=0.2))
    if strategy == "mp":
        metrics = replace(metrics, bubble=Bubble(measured=measured, ideal=0.5))
    row = replace(row, strategy=strategy, metrics=metrics)
    [advice] = [each.text for each in _next(row, [row]) if "idle" in each.text]
    assert words in advice


def without_data(comparison):
    for row in comparison["rows"]:
        row["metrics"]["data_seconds"] = 0.0
    return comparison


def test_the_wait_for_data_is_not_in_a_speed_up(compared):
    """Twice the batch took the same step, but each sample had to wait for 10 ms: `compare` called it
    twice as fast and did not mention the wait, and `tune` gave rates that nobody could reach."""
    one, two = timed(compared, 0.1, 0.1)["rows"]
    for row in (one, two):
        samples = 64 if row is one else 128
        row |= {"batch": row["batch"] | {"size": samples}, "samples_per_step": samples}
        row["metrics"] |= {"data_seconds": 0.01 * samples, "data_wait_seconds": 0.01 * samples}
    found = judge(timed(compared, 0.1, 0.1))
    assert "2.00 times as fast" in text(found, "fastest")
    [wait] = [finding for finding in found if finding.kind == "warning"]
    assert wait.evidence["data_wait_seconds"] == {"single": 0.64, "ddp ×2": 1.28}
    assert wait.evidence["speed_up_with_data"]["ddp ×2"] == pytest.approx(0.74 * 2 / 1.38)
    rows = typed(compared).rows
    assert _rate(_tuned(rows[1])) == "92.8 samples/s"
    # The rest of the gap between steps is not loading.
    two["metrics"]["data_seconds"] = one["metrics"]["data_seconds"] = 0.001
    assert not text(judge(compared), "warning")


def test_losses_add_up(compared):
    """Exposed communication costs more than the step lost, because the optimizer became faster than
    its share. The list of losses then gave more than there was to lose."""
    one, two = timed(compared, 0.1, 0.06)["rows"]
    for row, optimizer, exposed in ((one, 0.02, 0.0), (two, 0.005, 0.015)):
        row["metrics"] |= dict.fromkeys(("compute_seconds", "exposed_waiting_seconds"), 0.0)
        row["metrics"] |= {"optimizer_seconds": optimizer, "bubble": None}
        row["metrics"] |= {"exposed_communication_seconds": exposed}
    rows = typed(compared).rows
    lost = losses_of(rows[1], rows[0])
    assert lost["other"] == pytest.approx(-0.005)
    assert sum(lost.values()) == pytest.approx(0.06 - 0.05)
    [finding] = scaling_findings(typed(compared))
    assert "gains 5 ms" in finding.text


@pytest.mark.parametrize(("noise", "kind"), [(0.01, "fastest"), (0.3, "limit")])
def test_noise_is_not_perfect_scaling(compared, noise, kind):
    """1.9 times as fast on two devices is close to perfect, but not with an interval of 1.1–3."""
    one, two = timed(compared, 0.1, 0.0526)["rows"]
    two["round_seconds_per_sample"] = [
        each * (1 + way * noise)
        for each, way in zip(two["round_seconds_per_sample"], (-1, 1, 0, 0.5, -0.5), strict=True)
    ]
    ratio = speed_up(one["round_seconds_per_sample"], two["round_seconds_per_sample"])
    two |= {"speed_up": ratio.to_dict(), "efficiency": ratio.value / 2}
    [finding] = scaling_findings(typed(compared))
    assert (ratio.value > 1.8, finding.kind) == (True, kind)


def test_a_busy_machine_is_said(compared):
    single = timed(without_data(compared), 0.1, 0.07)["rows"][0]
    single["metrics"]["load"]["cores_per_rank"] = [0.98]
    assert not text(judge(compared), "warning")
    # A model that sleeps uses less than its cores, too, but it does not wait for a core.
    load = single["metrics"]["load"]
    load |= {"cores_per_rank": [0.5], "waiting_per_rank": [0.01]}
    assert not text(judge(compared), "warning")
    load["waiting_per_rank"] = [None]
    assert not text(judge(compared), "warning")
    load["waiting_per_rank"] = [0.5]
    assert "0.50 of its 1 core" in text(judge(compared), "warning")
    load |= {"cores_per_rank": [1.0], "waiting_per_rank": [7.0]}  # more threads than cores
    assert not text(judge(compared), "warning")


def test_a_failed_run_says_first_how_it_failed():
    """The page once began with the step time, and the failure was the last of five findings."""
    kinds = [finding.kind for finding in verdict(comparison_of_runs([ROOT / "tests/runs/raised"]))]
    assert kinds[0] == "warning"
    assert kinds.index("limit") == kinds.count("warning")
