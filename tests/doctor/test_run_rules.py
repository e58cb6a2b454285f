"""The doctor's findings in recorded runs. The folders in tests/runs come from real runs with real
faults."""

import dataclasses
import json
from pathlib import Path

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.recorded import Recorded
from paralab.doctor.registry import ordered
from paralab.errors import UsageError
from paralab.record.folder import SCHEMA_VERSION
from tests.analyse.recordings import plan, write

RUNS = Path(__file__).parent.parent / "runs"
FAILURES = {"H02", "H04", "H11", "H12", "H15", "H18", "L01", "L10", "L11", "W06", "W07", "A08"}


def diagnosed(folder):
    return ordered(apply("run", Recorded.read(folder)))


@pytest.mark.parametrize(
    ("run", "id", "rank", "words"),
    [
        ("killed", "H12", 1, "Rank 1 failed in step 3: was killed by SIGKILL"),
        ("raised", "H11", 1, "ValueError: a planted error"),
        ("left_early", "H02", 1, "ended itself with code 0"),
        ("stopped", "W07", 1, "is stopped (SIGSTOP, or Ctrl-Z)"),
        (
            "scaled_nan",
            "A08",
            None,
            "not finite from step 4 on (4 of 8 steps); GradScaler's scale fell",
        ),
    ],
)
def test_the_root_cause_comes_first_and_no_victim_is_blamed(run, id, rank, words):
    first, *rest = diagnosed(RUNS / run)
    assert (first.id, first.severity, first.rank) == (id, "error", rank)
    assert words in first.why
    assert first.file == str(RUNS / run)
    assert not FAILURES & {finding.id for finding in rest}
    assert all(finding.severity != "error" for finding in rest)


def test_too_few_steps_are_not_judged():
    """In the only measured step of this run, rank 0 was last by 8 ms. It was not a straggler; rank
    1 was the rank that stopped."""
    assert [finding.id for finding in diagnosed(RUNS / "stopped")] == ["W07"]


def test_the_evidence_of_a_hang_is_where_the_others_wait():
    assert (
        "rank 0 waits in all_reduce of 1,088 values" in diagnosed(RUNS / "stopped")[0].evidence[0]
    )


@pytest.mark.parametrize(
    ("code", "id"), [("dist.all_reduce(loss)", "H04"), ("while True: pass", "W07")]
)
def test_a_rank_that_does_not_arrive_waits_elsewhere_or_stands_still(tmp_path, code, id):
    folder = write(tmp_path / "hung", plan(), lambda rank: spans(8.5))
    problem = "Rank 1 did not arrive where the others wait for it: step 3 took 3.0 s, longer than its deadline of 3 s."
    (folder / "failures.jsonl").write_text(
        json.dumps({"attempt": 0, "problem": problem, "unix_seconds": 0}) + "\n"
    )
    said = folder / "stacks" / "0"
    said.mkdir(parents=True)
    waits = [
        {"file": "torch/distributed/c10d.py", "line": 9, "function": "wait", "code": "work.wait()"}
    ]
    runs = [{"file": "train.py", "line": 5, "function": "main", "code": code}]
    for rank, number, stack in ((0, 8, waits), (1, 7, runs + waits if id == "H04" else runs)):
        call = {
            "collective_seq_id": number,
            "process_group": ["0", "default"],
            "profiling_name": "gloo:all_reduce",
            "state": "started",
        }
        (said / f"rank{rank}.state").write_text(json.dumps({"state": "R"}))
        (said / f"rank{rank}.json").write_text(
            json.dumps({"stacks": {"MainThread": stack}, "collectives": [call]})
        )
    (finding,) = diagnosed(folder)
    assert (finding.id, finding.rank) == (id, 1)


def test_the_evidence_of_an_exception_is_its_last_lines():
    assert diagnosed(RUNS / "raised")[0].evidence[-1] == "ValueError: a planted error"


@pytest.mark.parametrize(
    ("run", "id", "gain"),
    [
        ("straggler", "W03", 0.97),
        ("synced_every_pass", "G02", 0.56),
        ("one_micro_batch", "P05", 0.39),
        ("dataparallel", "D02", 0.30),
    ],
)
def test_waste_is_found_with_its_share(run, id, gain):
    found = {finding.id: finding for finding in diagnosed(RUNS / run)}
    assert found[id].gain == pytest.approx(gain, abs=0.01)
    assert not FAILURES & set(found)


def test_the_straggler_is_the_rank_that_sleeps():
    assert (
        next(finding for finding in diagnosed(RUNS / "straggler") if finding.id == "W03").rank == 1
    )


def test_a_single_device_has_nothing_to_say():
    assert diagnosed(RUNS / "single") == []


def spans(first_bucket_ready=8.0, backward=(4.0, 8.0), done=9.0, bytes=2**24, rank_delay=0.0):
    return [
        ("forward", 0.0, 4.0, {"device": "cpu:0"}),
        ("backward", backward[0], done, {"device": "cpu:0"}),
        ("all_reduce", first_bucket_ready + rank_delay, done, {"bucket": 0, "bytes": bytes}),
        ("optimizer", done, 10.0, {}),
    ]


def test_laid_out_a_healthy_run_gives_nothing_and_one_large_bucket_two_findings(tmp_path):
    healthy = write(
        tmp_path / "healthy", plan(), lambda rank: spans(first_bucket_ready=8.5, done=9.0)
    )
    assert (
        diagnosed(healthy) == []
    )  # half a second of ten: 16 MiB that arrive before any rank waits
    slow = write(
        tmp_path / "slow",
        plan(),
        lambda rank: spans(first_bucket_ready=6.0, backward=(4.0, 6.0), done=9.0),
    )
    found = {finding.id: finding for finding in diagnosed(slow)}
    assert set(found) == {"W01", "W02"}
    assert found["W01"].gain == pytest.approx(0.3)  # 3 of 10 s
    # 2 s of backward pass could hide 2 · 3/4 of the 3 s
    assert found["W02"].gain == pytest.approx(0.15)
    assert "bucket_cap_mb=4" in found["W02"].fix


def test_laid_out_threads_over_the_cores_and_a_needless_search(tmp_path):
    four = write(tmp_path / "four", plan(ranks=4), lambda rank: spans(first_bucket_ready=8.5))
    assert [finding.id for finding in diagnosed(four)] == ["L09"]
    searched = write(
        tmp_path / "searched", plan(find_unused=True), lambda rank: spans(first_bucket_ready=8.5)
    )
    assert [finding.id for finding in diagnosed(searched)] == ["S04"]
    needed = write(
        tmp_path / "needed",
        plan(find_unused=True),
        lambda rank: spans(8.5),
        workload={"unused": ["head.bias"]},
    )
    assert diagnosed(needed) == []


def test_laid_out_ranks_that_share_cores_are_no_stragglers(tmp_path):
    late = write(
        tmp_path / "late",
        plan(ranks=4),
        lambda rank: spans(first_bucket_ready=5.0, rank_delay=3.5 * (rank == 3)),
    )
    assert "W03" not in {finding.id for finding in diagnosed(late)}
    alone = write(
        tmp_path / "alone",
        plan(ranks=2),
        lambda rank: spans(first_bucket_ready=5.0, rank_delay=3.5 * (rank == 1)),
    )
    assert [(f.id, f.rank) for f in diagnosed(alone) if f.id == "W03"] == [("W03", 1)]


def test_a_comparison_tells_low_precision_that_is_slower():
    (finding,) = diagnosed(RUNS / "low_precision")  # three rounds of fp32 and bf16 on a CPU
    assert (finding.id, finding.severity) == ("W04", "warning")
    assert "bf16 is 0.42× as fast as fp32 (0.30–0.57)" in finding.why
    assert finding.file == str(RUNS / "low_precision" / "01_single---bf16" / "round1")


def test_a_run_without_an_end_is_suspected_to_be_killed(tmp_path):
    folder = write(tmp_path / "cut", plan(), lambda rank: spans(first_bucket_ready=8.5))
    for path in (folder / "events").glob("*.jsonl"):
        path.write_text(
            "".join(
                line + "\n" for line in path.read_text().splitlines() if '"end", "time"' not in line
            )
        )
    (finding,) = diagnosed(folder)
    assert (finding.id, finding.severity) == ("H12", "suspect")
    assert "12 of 12 steps" in finding.why


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text(
        json.dumps({"schema": SCHEMA_VERSION, "kind": "verify"})
    )
    with pytest.raises(UsageError, match="neither a run nor a comparison"):
        Recorded.read(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        Recorded.read(tmp_path / "nothing")


def test_findings_are_plain_data():
    for finding in diagnosed(RUNS / "killed"):
        assert json.loads(json.dumps(dataclasses.asdict(finding)))["id"] == finding.id
