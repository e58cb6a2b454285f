"""The snapshot of a run shows its events' numbers, while it runs and after it ends."""

import json
import shutil

import pytest

from paralab.analyse import figures
from paralab.analyse.recording import Recording
from paralab.analyse.result import result_of
from paralab.doctor.diagnosis import check_paths
from paralab.serve import live_run
from paralab.serve.live_run import LiveRun
from tests.serve.conftest import RUNS


@pytest.mark.parametrize("name", ["ddp", "hybrid", "dp", "straggler", "raised"])
def test_a_finished_run_shows_the_numbers_of_its_result(tmp_path, name):
    shutil.copytree(RUNS / name, tmp_path / name)
    snapshot, result = LiveRun(tmp_path, name).update(), result_of(tmp_path / name)
    assert snapshot.status == result.status
    assert (snapshot.step, snapshot.num_steps) == (
        result.reached_step,
        Recording.read(tmp_path / name).plan.num_steps,
    )
    assert snapshot.step_seconds == pytest.approx(result.step_seconds.median)
    assert snapshot.samples_per_second == pytest.approx(result.samples_per_second)
    assert [y for _, y in snapshot.losses.lines[0].points] == pytest.approx(result.losses)
    assert snapshot.timeline == figures.timeline(Recording.read(tmp_path / name))
    ids = {finding.id for finding in check_paths([tmp_path / name]).findings}
    assert {finding.id for finding in snapshot.findings} == ids


def test_ranks_of_a_failed_run(tmp_path):
    shutil.copytree(RUNS / "killed", tmp_path / "killed")
    snapshot = LiveRun(tmp_path, "killed").update()
    assert snapshot.status == "failed"
    assert "SIGKILL" in snapshot.sentence
    assert [rank.status for rank in snapshot.ranks] == ["failed", "gone"]


def test_a_growing_run_is_read_incrementally(tmp_path, monkeypatch):
    """Each look reads only the bytes that were added, and shows the same as a full read."""
    monkeypatch.setattr(live_run, "POLL_SECONDS", 0.0)
    folder = tmp_path / "run"
    shutil.copytree(RUNS / "ddp", folder)
    files = sorted((folder / "events").iterdir())
    contents = [path.read_bytes() for path in files]
    for path in files:
        path.write_bytes(b"")
    run = LiveRun(tmp_path, "run")
    assert run.update().status == "starting"

    opened = []
    for part in range(1, 11):
        for path, content in zip(files, contents, strict=True):
            path.write_bytes(content[: len(content) * part // 10])
        opened.append(run.update())
    steps = [snapshot.step for snapshot in opened]
    assert steps == sorted(steps)
    assert len(set(steps)) > 3
    assert opened[-1] == LiveRun(tmp_path, "run").update()
    assert sum(tail._position for tail in run.follower._tails) == sum(map(len, contents))
    assert run.update() is opened[-1]  # without news, the same object


def test_a_run_without_an_end_is_not_suspected_while_it_may_run(tmp_path, monkeypatch):
    """The doctor suspects that a run without an end was killed. A run that is still training has no
    end yet."""
    folder = tmp_path / "run"
    shutil.copytree(RUNS / "ddp", folder)
    for path in (folder / "events").iterdir():
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"end"' not in line[:20]))
    monkeypatch.setattr(live_run, "is_running", lambda start: True)
    snapshot = LiveRun(tmp_path, "run").update()
    assert snapshot.status == "running"
    assert "H12" not in {finding.id for finding in snapshot.findings}
    monkeypatch.setattr(live_run, "is_running", lambda start: False)
    monkeypatch.setattr(live_run, "last_written", lambda folder: 0.0)
    snapshot = LiveRun(tmp_path, "run").update()
    assert snapshot.status == "killed"
    assert "H12" in {finding.id for finding in snapshot.findings}


def test_a_restarted_run_continues_with_its_next_attempt(tmp_path, monkeypatch):
    """The first attempt fails after 4 steps, and the second one resumes after 2 steps."""
    monkeypatch.setattr(live_run, "POLL_SECONDS", 0.0)
    folder = tmp_path / "run"
    shutil.copytree(RUNS / "ddp", folder)
    written = {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (folder / "events").iterdir()
    }

    def write(name, events):
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (folder / "events" / name).write_text(lines)

    for name, events in written.items():
        first = [event for event in events if event.get("step", 0) < 4 and event["event"] != "end"]
        write(name, [*first, {"event": "end", "time": 9.0, "status": "failed"}])
    run = LiveRun(tmp_path, "run")
    assert run.update().step == 4

    again = {
        name.replace(".jsonl", ".1.jsonl"): [
            event | {"loss": event["loss"] / 2} if "loss" in event else event
            for event in events
            if event.get("step", 2) >= 2
        ]
        for name, events in written.items()
    }
    for name, events in again.items():
        first = next(n for n, event in enumerate(events) if event["event"] == "step")
        write(name, events[: first + 1])
    assert run.update().step == 3  # the fourth step of the first attempt no longer counts
    for name, events in again.items():
        write(name, events)
    snapshot = run.update()
    assert (snapshot.restarts, snapshot.step, snapshot.status) == (1, 6, "completed")
    before = result_of(RUNS / "ddp").losses
    expected = [*before[:2], *(loss / 2 for loss in before[2:])]
    assert [y for _, y in snapshot.losses.lines[0].points] == pytest.approx(expected)
