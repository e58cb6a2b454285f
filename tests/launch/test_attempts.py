"""Restarts without processes: when paralab makes another attempt, and when it gives up."""

import json
import signal

import pytest

from paralab.errors import NothingLeft, UsageError
from paralab.launch import restart
from paralab.launch.restart import FailedAttempt, LocalLauncher, is_stuck
from tests.launch.fakes import FakeRanks, exits, make_job, make_training, write_events
from tests.record.test_checkpoints import make as make_checkpoint


@pytest.mark.parametrize(
    ("attempts", "stuck"),
    #  (resumed from, saved, last step)
    [
        ([], False),
        ([(0, 0, 7)], False),
        ([(4, 4, 7), (4, 4, 7)], True),  # failed at the same step without a new checkpoint
        ([(4, 4, 7), (4, 8, 7)], False),  # it saved
        ([(4, 4, 7), (4, 4, 5)], False),  # it failed elsewhere
        ([(0, 0, -1), (0, 0, -1)], True),  # before the first step, twice
        ([(4, 4, 7), (4, 4, 7), (4, 4, 6)], False),  # only the last two count
    ],
)
def test_when_another_attempt_would_only_repeat_the_failure(attempts, stuck):
    assert is_stuck([FailedAttempt(*attempt) for attempt in attempts]) is stuck


def complete(folder, attempt):
    write_events(folder, "completed", attempt, steps=range(10))
    return exits(0, 0)


def fail_after(step, directory=None, save=None):
    """A script that fails after this step, with a checkpoint after `save` steps."""

    def script(folder, attempt):
        write_events(folder, None, attempt, steps=range(step + 1))
        if save:
            make_checkpoint(directory, save)
        return exits(-signal.SIGKILL, None, noticed=5.0)

    return script


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Run these scripts, one per attempt; return the outcome, the specs, and the printed lines."""

    def launch(*scripts, **options):
        ranks = FakeRanks(*scripts)
        monkeypatch.setattr(restart, "run_ranks", ranks)
        job, said = make_job(tmp_path / "run", **options)
        return LocalLauncher().run(job), ranks.specs, said

    return launch


def test_a_run_that_completes_is_not_restarted(launch, tmp_path):
    outcome, specs, said = launch(complete, max_restarts=3)
    assert (outcome.status, outcome.attempt, len(specs), said) == ("completed", 0, 1, [])
    assert not (tmp_path / "run" / "failures.jsonl").exists()


def test_ranks_that_exit_with_0_but_did_not_complete_have_failed(launch):
    def leave(folder, attempt):
        write_events(folder, None, attempt, steps=range(3))
        return exits(0, 0)

    assert launch(leave)[0].status == "failed"


def test_a_restart_continues_from_the_last_checkpoint(launch, tmp_path):
    kept = tmp_path / "kept"
    outcome, specs, said = launch(
        fail_after(7, kept, save=6), complete, checkpoint=kept, max_restarts=2
    )
    assert (outcome.status, outcome.attempt) == ("completed", 1)
    assert [spec["attempt"] for spec in specs] == [0, 1]
    assert [spec["checkpoints"]["done"] for spec in specs] == [0, 6]
    assert said[0] == "attempt 0 failed"
    assert "step 6" in said[1]
    assert "restart 1 of 2" in said[1]
    [line] = (tmp_path / "run" / "failures.jsonl").read_text().splitlines()
    assert json.loads(line) == {"attempt": 0, "problem": "attempt 0 failed", "unix_seconds": 5.0}


def test_without_checkpoints_a_restart_starts_over(launch):
    outcome, specs, _ = launch(fail_after(7), complete, max_restarts=1)
    assert outcome.status == "completed"
    assert [spec["checkpoints"] for spec in specs] == [None, None]


def test_a_run_restarts_as_often_as_allowed(launch):
    scripts = [fail_after(step) for step in (3, 4, 5)]
    outcome, specs, _ = launch(*scripts, max_restarts=2)
    assert (outcome.status, outcome.attempt, outcome.stuck_after) == ("failed", 2, None)
    assert len(specs) == 3
    assert outcome.exits.codes == [-signal.SIGKILL, None]


def test_restarts_stop_after_two_failures_at_the_same_step(launch):
    outcome, specs, _ = launch(*[fail_after(7)] * 5, max_restarts=4)
    assert (outcome.status, outcome.stuck_after, len(specs)) == ("failed", 7, 2)


def test_progress_between_two_failures_at_the_same_step_is_worth_another_attempt(launch, tmp_path):
    kept = tmp_path / "kept"
    scripts = [fail_after(7, kept, save=2), fail_after(7, kept, save=4), complete]
    outcome, specs, _ = launch(*scripts, checkpoint=kept, max_restarts=4)
    assert outcome.status == "completed"
    assert [spec["checkpoints"]["done"] for spec in specs] == [0, 2, 4]


@pytest.mark.parametrize(("written", "status"), [(True, "completed"), (False, "failed")])
def test_a_failure_after_the_last_step_was_saved(launch, tmp_path, monkeypatch, written, status):
    """No step is left to train, so the run counts as completed if its other files exist."""
    kept, weights = tmp_path / "kept", tmp_path / "weights.pt"
    monkeypatch.setattr("tests.launch.fakes.make_training", with_weights(weights))
    if written:
        weights.touch()
    outcome, specs, _ = launch(fail_after(9, kept, save=10), checkpoint=kept, max_restarts=3)
    assert (outcome.status, len(specs)) == (status, 1)


def with_weights(path):
    return lambda folder: make_training(folder, extras={"save_weights": str(path)})


def test_a_signal_that_asked_to_stop_also_ends_the_restarts(launch, tmp_path):
    def signalled(folder, attempt):
        signal.raise_signal(signal.SIGTERM)
        return fail_after(3)(folder, attempt)

    outcome, specs, _ = launch(signalled, checkpoint=tmp_path / "kept", max_restarts=3)
    assert (outcome.status, len(specs)) == ("failed", 1)


def test_ctrl_c_is_an_outcome(launch):
    def interrupt(folder, attempt):
        raise KeyboardInterrupt

    outcome, _, _ = launch(interrupt)
    assert (outcome.status, outcome.signal) == ("interrupted", signal.SIGINT)


def test_a_graceful_stop_is_not_a_failure(launch, tmp_path):
    def stop(folder, attempt):
        write_events(folder, "stopped", attempt, steps=range(4))
        return exits(0, 0)

    outcome, specs, _ = launch(stop, checkpoint=tmp_path / "kept", max_restarts=3)
    assert (outcome.status, len(specs)) == ("stopped", 1)


def test_resuming_a_finished_run_starts_no_ranks(launch, tmp_path):
    make_checkpoint(tmp_path / "kept", 10)
    with pytest.raises(NothingLeft):
        launch(checkpoint=tmp_path / "kept", resume=True)
    make_checkpoint(tmp_path / "longer", 12)
    with pytest.raises(UsageError, match="--steps 13"):
        launch(checkpoint=tmp_path / "longer", resume=True, out=tmp_path / "run2")
