"""A run's numbers, from its folder alone. tests/runs/ddp was recorded with `paralab run ddp
--replicas 2 --accumulate 2 …`."""

import json
import shutil
from pathlib import Path

import pytest

from paralab.analyse.result import Spread, result_of, spread
from tests.analyse.recordings import STEP, plan, write

RECORDED = Path(__file__).parent.parent / "runs" / "ddp"


def test_a_recorded_run():
    result = result_of(RECORDED)
    assert result["status"] == "completed"
    assert result["steps"] == 6
    assert result["batch"]["arithmetic"] == "32 = 2 ranks × 2 accumulation steps × 8 samples"
    assert [(rank["rank"], rank["devices"], rank["virtual"]) for rank in result["ranks"]] == [
        (0, ["cpu:0"], True),
        (1, ["cpu:1"], True),
    ]
    assert result["all_reduces_per_step"] == 1  # two passes, synchronized at the last
    assert result["bytes_per_step"] == 4352
    assert [split["shape"] for split in result["splits"]] == [[8, 16], [8, 16]]
    assert (
        0
        < result["step_seconds"]["p10"]
        <= result["step_seconds"]["median"]
        <= result["step_seconds"]["p90"]
    )
    assert [memory["device"] for memory in result["peak_bytes"]] == ["cpu:0", "cpu:1"]


def test_an_epochs_last_smaller_batch_is_not_a_step_time(tmp_path):
    """An epoch of 300 samples alternates between batches of 256 and 44. The median of both, divided
    by the mean size, made a batch of 256 look three times as fast as it was."""
    run = write(tmp_path / "run", plan("single", ranks=1), lambda rank: [], steps=12)
    events = run / "events" / "rank0.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for line in lines:
        if line["event"] == "step" and line["step"] % 2:
            line |= {"samples": 11, "end": line["end"] - 0.8 * STEP}
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = result_of(run)
    assert result.step_seconds == Spread(median=STEP, p10=STEP, p90=STEP)
    assert (result.samples_per_step, result.warm_up_steps, result.smaller_steps) == (64, 3, 5)


def test_the_only_full_batch_is_timed(tmp_path):
    """An epoch of 65 samples has batches of 64 and 1. Only the second was timed, so `compare` gave
    the time of one sample as the step time of a batch of 64."""
    run = write(tmp_path / "run", plan("single", ranks=1), lambda rank: [], steps=2)
    events = run / "events" / "rank0.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for line in lines:
        if line["event"] == "step" and line["step"] == 1:
            line |= {"samples": 1, "end": line["end"] - 0.8 * STEP}
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = result_of(run)
    assert result.step_seconds == Spread(median=STEP, p10=STEP, p90=STEP)
    assert (result.samples_per_step, result.warm_up_steps, result.smaller_steps) == (64, 0, 1)
    assert any("includes the warm-up" in warning for warning in result.warnings)


def test_the_loss_is_the_sum_of_the_ranks_parts():
    files = sorted((RECORDED / "events").iterdir())
    lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    parts = [[event["loss"] for event in rank if event["event"] == "step"] for rank in lines]
    assert result_of(RECORDED)["losses"] == [a + b for a, b in zip(*parts, strict=True)]


def copy_without(tmp_path, keep):
    folder = tmp_path / "run"
    shutil.copytree(RECORDED, folder)
    for path in (folder / "events").iterdir():
        lines = [line for line in path.read_text().splitlines() if keep(json.loads(line))]
        path.write_text("\n".join(lines) + '\n{"event":"ste')
    return folder


@pytest.mark.parametrize("last", [-1, 0, 2])
def test_a_run_killed_at_any_moment_is_readable(tmp_path, last):
    folder = copy_without(
        tmp_path, lambda event: event["event"] != "end" and event.get("step", -1) <= last
    )
    result = result_of(folder)
    assert result["status"] == "killed"
    assert result["steps"] == last + 1
    assert any(f"{last + 1} of 6 steps" in warning for warning in result.warnings)
    assert (result["step_seconds"] is None) == (last < 0)


def test_even_a_run_without_events_is_readable(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(RECORDED, folder)
    shutil.rmtree(folder / "events")
    assert result_of(folder)["steps"] == 0


def test_a_loss_that_is_not_finite_is_said_and_json_stays_json(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(RECORDED, folder)
    path = folder / "events" / "rank0.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if event["event"] == "step" and event["step"] >= 4:
            event["loss"] = float("nan")
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    result = result_of(folder)
    assert result["losses"][4:] == [None, None]
    assert any("step 4" in warning for warning in result.warnings)


def test_the_spread_interpolates():
    assert spread([]) is None
    assert spread([7]) == Spread(median=7, p10=7, p90=7)
    assert spread([0, 10]).p10 == pytest.approx(1)
    assert spread([1, 2, 3, 4, 5]).median == 3


def test_a_warning_has_no_period():
    """Each output adds a period, so the explanation of an attempt once ended with two."""
    warnings = result_of(RECORDED.parent / "stopped").warnings
    assert [text for text in warnings if text.endswith(".")] == []
    assert any("attempt 1 failed" in text for text in warnings)


def test_the_estimate_next_to_the_measured_peak(tmp_path):
    """A counted peak is compared with the sum of the same kinds, and an allocator's with the peak.
    Rank 1 has no estimate."""
    folder = tmp_path / "run"
    shutil.copytree(RECORDED, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    measured = result_of(RECORDED).peak_bytes[0].bytes
    kinds = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 1)
    kinds |= dict.fromkeys(("gathered", "unreduced", "buckets"))
    sums = {"counted": 2 * measured, "peak": measured // 2}
    device = {"rank": 0, "device": "cpu:0", **kinds, **sums}
    memory = {"devices": [device], "not_estimated": None, "no_peak": None, "notes": [], "fit": None}
    manifest["plan"]["memory"] = memory
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = [(each.estimated_bytes, each.estimate_error) for each in result_of(folder).peak_bytes]
    assert found == [(2 * measured, 1.0), (None, None)]

    assert result_of(folder).memory_not_estimated is None

    manifest["plan"]["memory"] = memory | {"devices": [], "not_estimated": "values"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert result_of(folder).memory_not_estimated == "values"

    manifest["plan"]["memory"] = memory
    (folder / "manifest.json").write_text(json.dumps(manifest))
    events = folder / "events" / "rank0.jsonl"
    events.write_text(events.read_text().replace('"how":"counted"', '"how":"allocator"'))
    assert result_of(folder).peak_bytes[0].estimated_bytes == measured // 2
