"""From a launcher's outcome to a result or an error, without processes."""

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest

from paralab.errors import Interrupted, Paused, RunFailed
from paralab.experiment import explain_failure, shared_launch
from paralab.experiment.planning import create_run
from paralab.experiment.run import find_error
from paralab.experiment.shared_launch import train_all
from paralab.launch.inspect import Inspected
from paralab.launch.job import Outcome
from paralab.launch.watchdog import LateRank
from paralab.record.checkpoints import CheckpointPolicy
from paralab.record.folder import RunFolder
from paralab.record.status_board import Post
from tests.launch.fakes import MACHINE, SUMMARY, exits, make_plan, write_events
from tests.record.test_checkpoints import make as make_checkpoint

INSPECTED = Inspected(MACHINE, SUMMARY)


@pytest.fixture
def training(tmp_path):
    return create_run(tmp_path / "run", make_plan(), INSPECTED)


def outcome_of(training, status, **fields):
    return Outcome(training.folder, status, training, **fields)


def test_a_completed_run_has_no_error(training):
    assert find_error(outcome_of(training, "completed"), 10) is None


def test_an_interrupted_run_exits_with_the_code_of_its_signal(training):
    error = find_error(outcome_of(training, "interrupted", signal=signal.SIGTERM), 3)
    assert isinstance(error, Interrupted)
    assert (error.exit_code, "SIGTERM" in error.problem) == (143, True)
    assert "3 of 10" in error.problem


@pytest.mark.parametrize(
    ("saved", "kind"), [(None, RunFailed), (2, RunFailed), (3, Paused), ("none", Paused)]
)
def test_saved_means_saved(tmp_path, saved, kind):
    """The run stopped after 3 steps. It may say "saved" only if the checkpoint of those steps
    exists."""
    kept = tmp_path / "kept"
    policy = CheckpointPolicy(str(kept))
    training = create_run(tmp_path / "run", make_plan(), INSPECTED, checkpoints=policy)
    steps = 0 if saved == "none" else 3  # before the first step, there is nothing to save
    write_events(training.folder.path, "stopped", steps=range(steps))
    if saved in (2, 3):
        make_checkpoint(kept, saved)
    error = find_error(outcome_of(training, "stopped"), steps)
    assert type(error) is kind
    assert error.exit_code == (75 if kind is Paused else 1)


@pytest.mark.parametrize(
    ("phase", "step", "words"),
    [
        ("start", -1, "first step"),
        ("step", 4, "step 4"),
        ("save", 5, "5 steps"),
        ("end", -1, "end"),
    ],
)
def test_a_failure_names_the_rank_the_signal_and_the_phase(training, phase, step, words):
    posts = [Post("step", 0, 0.0, False), Post(phase, step, 0.0, False)]
    ended = exits(None, -signal.SIGSEGV)
    ended = type(ended)(ended.codes, posts)
    error = explain_failure.explain_failure(outcome_of(training, "failed", exits=ended))
    assert error.problem.startswith("Rank 1 ")
    assert "SIGSEGV" in error.problem
    assert words in error.problem
    assert "rank1.txt" in str(error.fix)


def test_a_failure_that_repeats_says_after_which_step(training):
    failed = outcome_of(training, "failed", exits=exits(1, None), stuck_after=7)
    assert "step 7" in explain_failure.explain_failure(failed).problem.split("rank0.txt")[-1]
    never = outcome_of(training, "failed", exits=exits(1, None), stuck_after=-1)
    assert "first step" in explain_failure.explain_failure(never).problem


def test_a_full_disk_is_named_where_torch_does_not(training, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(explain_failure.shutil, "disk_usage", lambda path: usage)
    failed = outcome_of(training, "failed", exits=exits(1, None))
    assert os.strerror(errno.ENOSPC) in explain_failure.explain_failure(failed).problem


def test_a_hang_names_the_deadline_to_raise(training):
    late = [LateRank(1, "save", 4, 12.34, 10.0)]
    failed = outcome_of(training, "failed", exits=exits(None, None, late=late))
    error = explain_failure.explain_failure(failed)
    assert "12.3 s" in error.problem
    assert "10 s" in error.problem
    assert "--save-deadline" in str(error.fix)


class Launches:
    """Replaces `run_ranks`. It completes each training; at one in `failing`, the launch ends."""

    def __init__(self, *failing):
        self.failing, self.launches = failing, []

    def __call__(self, folder, specs, origin, on_poll, deadlines):
        runs = [Path(spec["events"]).parent for spec in specs]
        self.launches.append([run.name for run in runs])
        self.deadlines = [spec["deadline_seconds"] for spec in specs]
        for run in runs:
            if run.name in self.failing:
                write_events(run, "failed", steps=range(2))
                return exits(1, 1)
            write_events(run, "completed", steps=range(10))
        return exits(0, 0)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train a, b, c, … in one launch. Return the errors, and which trainings were launched
    together."""

    def train(names, *failing, **fields):
        launches = Launches(*failing)
        monkeypatch.setattr(shared_launch, "run_ranks", launches)
        trainings = []
        for name in names:
            own = {field: values[name] for field, values in fields.items() if name in values}
            trainings.append(create_run(tmp_path / name, make_plan(), INSPECTED, **own))
        failed = train_all(RunFolder(tmp_path), trainings)
        return {names[number] for number in failed}, launches

    return train


def test_one_launch_is_enough_if_nothing_fails(train):
    failed, launches = train("abc")
    assert (failed, launches.launches) == (set(), [["a", "b", "c"]])


def test_a_failed_training_does_not_take_the_others_along(train):
    failed, launches = train("abc", "b")
    assert failed == {"b"}
    assert launches.launches == [["a", "b", "c"], ["c"]]


def test_trainings_of_the_same_case_are_skipped(train):
    failed, launches = train("abcd", "b", case={"b": "x", "d": "x"})
    assert failed == {"b", "d"}
    assert launches.launches[-1] == ["c"]


def test_what_is_compared_with_a_failed_reference_fails_too(train):
    extras = {"a": {"save_reference": "r.pt"}, "b": {"compare_with": "r.pt"}}
    failed, launches = train("abc", "a", extras=extras)
    assert failed == {"a", "b"}
    assert launches.launches[-1] == ["c"]


def test_the_deadline_of_a_failed_training_applies_to_the_next(train):
    _, launches = train("abc", "b", deadline_seconds={"b": 60.0})
    assert launches.launches[-1] == ["c"]
    assert launches.deadlines[0] == pytest.approx(60.0, abs=5)
