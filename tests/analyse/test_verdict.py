"""The verdict in words follows the numbers: the same sentences on other numbers are other
sentences."""

import copy
import json

import pytest

from paralab.analyse.compare import comparison_of, comparison_of_runs, loss_difference
from paralab.analyse.confidence import speed_up
from paralab.analyse.efficiency_loss import losses_of
from paralab.analyse.report import report, same_training
from paralab.analyse.scaling import findings as scaling_findings
from paralab.analyse.tune import findings as tuned_findings
from paralab.analyse.verdict import tune_command, verdict
from paralab.errors import UsageError
from tests.analyse.recordings import plan, write
from tests.analyse.test_metrics import one_is_slow, two_buckets


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
    found = comparison_of_runs([folders / "single", folders / "ddp"])
    found["rounds"] = 5
    return found


def timed(comparison, *steps):
    """Give every row these step times in five rounds, a little noisy."""
    rows = comparison["rows"]
    for row, step in zip(rows, steps, strict=True):
        row["step_seconds"] = {"median": step, "p10": step, "p90": step}
        row["round_seconds"] = [step * noise for noise in (1.0, 1.01, 0.99, 1.005, 0.995)]
        row["round_seconds_per_sample"] = [
            seconds / row["batch"]["size"] for seconds in row["round_seconds"]
        ]
        ratio = speed_up(rows[0]["round_seconds_per_sample"], row["round_seconds_per_sample"])
        row["speed_up"] = vars(ratio) | {"verdict": "baseline" if row is rows[0] else ratio.verdict}
        row["efficiency"] = ratio.value / row["devices"]
    return comparison


def text(findings, kind):
    return " ".join(finding.text for finding in findings if finding.kind == kind)


def test_what_is_fastest_depends_on_the_numbers(compared):
    assert "`ddp ×2` is the fastest" in text(verdict(timed(compared, 0.1, 0.06)), "fastest")
    assert "Nothing is measurably faster than `single`" in text(
        verdict(timed(compared, 0.1, 0.2)), "fastest"
    )
    equal = verdict(timed(compared, 0.1, 0.0999))
    assert "Nothing is measurably faster than `single`" in text(equal, "fastest")
    assert not text(equal, "limit"), "what cannot be told from the baseline is not explained"
    assert "A perfect split over 2 devices would take 50 ms; `ddp ×2` takes 200 ms." in text(
        verdict(timed(compared, 0.1, 0.2)), "limit"
    )


def test_one_round_is_not_called_sure(folders):
    found = verdict(comparison_of_runs([folders / "single", folders / "ddp"]))
    assert "Too few rounds to tell how sure that is" in text(found, "fastest")


def test_a_larger_batch_is_not_held_against_a_smaller_ones_step(compared):
    """Twice the batch on two devices in the same time is perfect scaling."""
    rows = compared["rows"]
    rows[1]["batch"] = rows[1]["batch"] | {"size": 128}
    found = verdict(timed(compared, 0.1, 0.1))
    assert "2.00 times as fast" in text(found, "fastest")
    assert "loses next to nothing: 100 ms against 100 ms" in text(found, "limit")


def test_what_is_lost_adds_up_to_what_is_missing(compared):
    rows = timed(compared, 10.0, 10.0)["rows"]
    lost = losses_of(rows[1], rows[0])
    assert lost["exposed communication"] == pytest.approx(3)
    assert sum(lost.values()) == pytest.approx(5)  # a perfect step takes 5 s
    assert losses_of(rows[1], rows[1])["exposed communication"] == 0, (
        "against itself nothing is lost"
    )


def test_a_failed_set_up_is_told_also_if_only_one_is_left(compared):
    compared["rows"][1]["error"] = "Rank 1 failed: out of memory"
    assert "out of memory" in text(verdict(compared), "warning")
    for row in compared["rows"]:
        row["error"] = "no luck"
    assert text(verdict(compared), "warning").count("no luck") == 2
    assert scaling_findings(compared) == ()


def test_losses_that_are_not_finite_are_not_called_equal(compared, folders):
    row = compared["rows"][1]
    row["parity"] = {
        "equal": True,
        "legitimate": False,
        "max_difference": 0.0,
        "tolerance": 1e-10,
        "cause": None,
    }
    assert same_training(row) == "equal"
    row["not_finite_losses"] = 3
    assert same_training(row) == "equal, but 3 losses not finite"
    assert loss_difference([1.0, None], [1.0, 0.9]) is None
    assert loss_difference([1.0, 1.1], [1.0, 1.0]) == pytest.approx(0.1)
    assert loss_difference([1.0], [1.0, 1.0]) == 0.0


def test_a_straggler_must_be_named_by_most_rounds(folders, tmp_path):
    def experiment(runs):
        entry = {
            "name": "ddp",
            "command": "",
            "request": {"strategy": "ddp", "workload": "mlp", "precision": None},
            "error": None,
        }
        cases = [entry | {"runs": [str(folders / run) for run in runs]}]
        first = json.loads((folders / "ddp" / "manifest.json").read_text())
        manifest = {
            "kind": "compare",
            "about": {},
            "rounds": len(runs),
            "left_out": [],
            "cases": cases,
        }
        (tmp_path / "manifest.json").write_text(json.dumps(first | manifest))
        return comparison_of(tmp_path)["rows"][0]["metrics"]["straggler"]

    assert experiment(["late", "ddp", "ddp"]) is None
    assert experiment(["late", "late", "ddp"])["rank"] == 1


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
    assert "no step was finished" in found["rows"][1]["error"]
    assert "no step was finished" in text(report(found, tmp_path).findings, "warning")


def test_the_suggested_search_is_of_the_same_training(compared):
    asked = {
        "workload": "my model.py:f",
        "replicas": 3,
        "batch_size": 60,
        "precision": "bf16",
        "seed": 0,
    }
    row = compared["rows"][1] | {"request": asked}
    assert (
        tune_command(row)
        == "paralab tune ddp --workload 'my model.py:f' --replicas 3 --batch-size 60 --precision bf16"
    )


def test_tuning_says_when_the_default_is_best():
    ratio = {"value": 1.2, "low": 1.1, "high": 1.3}
    row = {
        "name": "ddp",
        "command": "paralab run ddp",
        "step_seconds": {"median": 0.1},
        "speed_up": ratio,
    }
    choice = {"default": row, "chosen": row, "best_is_default": True, "low_precision": None}
    assert "The default stays" in tuned_findings(choice)[0].text
    better = copy.deepcopy(row) | {"name": "ddp · bucket 4 MB", "step_seconds": {"median": 0.08}}
    told = tuned_findings(choice | {"chosen": better, "best_is_default": False})[0].text
    assert "1.20 times as fast (1.10–1.30)" in told
    assert "paralab run ddp" in told


def test_a_large_but_unsure_speed_up_does_not_hide_a_sure_one(compared):
    """The row with the largest estimate may be the noisiest: the sure one is the fastest."""
    rows = timed(compared, 0.1, 0.07)["rows"]
    wild = copy.deepcopy(rows[1]) | {
        "name": "wild",
        "round_seconds_per_sample": [s / 64 for s in (0.01, 0.2, 0.02, 0.3, 0.05)],
    }
    ratio = speed_up(rows[0]["round_seconds_per_sample"], wild["round_seconds_per_sample"])
    wild["speed_up"] = vars(ratio) | {"verdict": ratio.verdict}
    assert ratio.value > 1.5
    assert ratio.verdict == "no measurable difference"
    compared["rows"].append(wild)
    assert "`ddp ×2` is the fastest" in text(verdict(compared), "fastest")


def test_a_busy_machine_is_said(compared):
    single = timed(compared, 0.1, 0.07)["rows"][0]
    single["peak_bytes"] = [{"bytes": 1, "how": "counted", "rank": 0, "device": "cpu:0"}]
    single["metrics"]["load"]["cores_per_rank"] = [0.98]
    assert "busy" not in text(verdict(compared), "warning")
    single["metrics"]["load"]["cores_per_rank"] = [0.5]
    assert "got 0.50 of its 1 core" in text(verdict(compared), "warning")
