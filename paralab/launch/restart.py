"""A training that outlives its failures: where it begins, how it is stopped, and what happens when
a rank dies.

The launcher alone decides which checkpoint is loaded: it reads every byte of it first, and hands
the ranks a folder that is whole.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from paralab.analyse.recording import Recording
from paralab.errors import NothingLeft, RunFailed, UsageError, naming
from paralab.launch.jobs import TrainingJob, failure
from paralab.launch.local import launch
from paralab.launch.run_options import RunOptions
from paralab.launch.watchdog import Deadlines
from paralab.machine.signals import STOPS, TYPED, StopSignal, hear, name_of
from paralab.plan.plan import Plan
from paralab.record.checkpoints import (
    KEPT,
    TOPOLOGY,
    Checkpoint,
    CheckpointPolicy,
    checkpoints,
    last_good,
    require_same_training,
    step_folder,
)
from paralab.record.reader import read_events
from paralab.record.status_board import StatusBoard
from paralab.units import plural

try:
    import fcntl
except ImportError:  # elsewhere than on Unix there are no such locks
    fcntl = None  # type: ignore[assignment]

Say = Callable[[str], None]
IN_USE = ".in-use"  # who writes to a folder of checkpoints
REPEAT_SECONDS = (
    5.0  # `timeout`, and a script that passes signals on, send the same one twice at once
)


@dataclass(frozen=True)
class RestartPolicy:
    """What a run does about its end: which checkpoints it makes, and how often it is started
    again."""

    directory: Path | None = None
    every: int | None = None
    keep: int = KEPT
    resume: bool = False
    max_restarts: int = 0
    deadlines: Deadlines = field(default_factory=Deadlines)

    @classmethod
    def from_options(cls, options: RunOptions) -> RestartPolicy:
        return cls(
            directory=options.checkpoint,
            every=options.checkpoint_every,
            keep=options.keep_checkpoints,
            resume=options.resume,
            max_restarts=options.max_restarts,
            deadlines=Deadlines(
                options.start_deadline, options.step_deadline, options.save_deadline
            ),
        )

    def options(self) -> list[str]:
        """As they would be written in a command, without --resume; the folder as seen from
        anywhere."""
        kept = [] if self.directory is None else ["--checkpoint", str(self.directory.absolute())]
        kept += [] if self.every is None else ["--checkpoint-every", str(self.every)]
        kept += [] if self.keep == KEPT else ["--keep-checkpoints", str(self.keep)]
        patience = zip(Deadlines._fields, self.deadlines, Deadlines(), strict=True)
        return kept + [
            word
            for name, given, usual in patience
            if given != usual
            for word in (f"--{name}-deadline", f"{given:g}")
        ]

    def check(self) -> None:
        if self.directory is None and (self.every is not None or self.resume):
            flag = "--checkpoint-every" if self.every is not None else "--resume"
            raise UsageError(
                f"{flag} needs a folder for the checkpoints.", fix=f"{flag} … --checkpoint DIR"
            )
        for flag, value in {"checkpoint-every": self.every, "keep-checkpoints": self.keep}.items():
            if value is not None and value < 1:
                raise UsageError(
                    f"--{flag} {value} is not a positive number.", fix=f"--{flag} 1 or more"
                )
        if self.max_restarts < 0:
            raise UsageError(
                f"--max-restarts must not be negative: {self.max_restarts}.", fix="--max-restarts 3"
            )
        self.deadlines.check()
        if self.directory is None or not self.directory.exists():
            return
        if not self.directory.is_dir():
            raise UsageError(f"--checkpoint {self.directory} is a file.", fix="a folder")
        if not self.resume and (found := checkpoints(self.directory)):
            raise UsageError(
                f"--checkpoint {self.directory} holds {plural(len(found), 'checkpoint')} already, up to step {found[-1].step}.",
                fix="--resume to go on with the last one, or another folder",
            )

    def cuts(self, strategy: str) -> list[str]:
        """Where the stages begin in the checkpoint to resume from. Timings would choose anew, and
        maybe differently, and then the random numbers of the stages no longer match those of the
        interrupted run."""
        if not self.resume or self.directory is None or not self.directory.is_dir():
            return []
        whole = [checkpoint for checkpoint in checkpoints(self.directory) if not checkpoint.problem]
        topology = whole[-1].manifest.get("topology", {}) if whole else {}
        return topology.get("cuts") or [] if topology.get("strategy") == strategy else []

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Nobody else writes to the folder meanwhile. The lock ends with this process, however that
        ends."""
        if self.directory is None or fcntl is None:
            yield
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = (self.directory / IN_USE).open("a+")
        except OSError as error:
            raise UsageError(
                f"--checkpoint {self.directory} cannot be written: {error.strerror}.",
                fix="another folder",
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UsageError(
                    f"--checkpoint {self.directory} is in use by another run: {file.read().strip()}.",
                    fix="another folder for this one, or wait for its end and --resume",
                ) from None
            except OSError:
                pass  # a file system without locks
            with naming(file.name):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
            yield

    def begin(self, plan: Plan, say: Say, resume: bool | None = None) -> CheckpointPolicy | None:
        """The checkpoint to begin with, if any. One that is not whole is named, moved out of the
        way, and not used."""
        if self.directory is None:
            return None
        keeping = CheckpointPolicy(str(self.directory.resolve()), self.every, self.keep)
        if not (self.resume if resume is None else resume):
            return keeping
        good, bad = last_good(self.directory)
        for checkpoint in bad:
            say(f"{checkpoint.path} cannot be used: {checkpoint.problem}.")
        if good is None:
            if not all(checkpoint.half_written for checkpoint in bad):
                raise UsageError(
                    f"--resume: none of the checkpoints in {self.directory} is whole ("
                    + "; ".join(
                        f"{checkpoint.path.name}: {checkpoint.problem}" for checkpoint in bad
                    )
                    + ").",
                    fix="a backup of one of them, or another --checkpoint DIR to begin anew",
                )
            say(f"No checkpoint in {self.directory}: from the beginning.")
        else:
            require_same_training(good.manifest, plan.training, good.path)
            if good.step > plan.num_steps:
                raise UsageError(
                    f"--resume: {good.path} is after {good.step} steps, and this run has {plan.num_steps}.",
                    fix=f"--steps {good.step + 1} or more",
                )
        for checkpoint in bad:
            set_aside(checkpoint)
        if good is None:
            return keeping
        found = {
            "done": good.step,
            "samples": good.manifest["samples_seen"],
            "same_topology": _same(good, plan),
        }
        return replace(keeping, resume=str(good.path.resolve()), **found)


def train(
    job: TrainingJob,
    survival: RestartPolicy,
    on_poll: Callable[[], None],
    origin_seconds: float,
    say: Say,
) -> tuple[RunFailed | None, bool]:
    """Train, and start again after a failure as often as allowed; (the error in the end, whether it
    was stopped and saved)."""
    job = replace(job, keeping=survival.begin(job.plan, say))
    require_steps_left(job)
    with stopping_in_order(enabled=job.keeping is not None) as asked:
        for attempt in range(survival.max_restarts + 1):
            spec = job.spec(attempt=attempt)
            ending = launch(
                job.folder,
                [spec],
                origin_seconds,
                on_poll,
                survival.deadlines,
                attempt,
                agree_when(asked, say),
            )
            status = Recording.read(job.folder.path).status
            if not ending.failed and status in ("completed", "stopped"):
                return (None, False) if status == "completed" else (unsaved(job), True)
            error = failure(job, job.folder, ending, attempt)
            job.folder.note_failure(attempt, error.problem, ending.noticed)
            if attempt == survival.max_restarts or asked:
                return error, False
            before = job.keeping
            reached = _last_step(job.folder.path, attempt)
            say(f"{error.problem}")
            job = replace(job, keeping=survival.begin(job.plan, say, resume=True))
            if job.keeping and job.keeping.done == job.plan.num_steps:
                # It failed after every step was done and saved. What it was to leave besides, if
                # that is there, makes it whole.
                return None if all(
                    Path(path).exists() for path in job.extras.values()
                ) else error, False
            if attempt and not _progress(
                job, before, reached, _last_step(job.folder.path, attempt - 1)
            ):
                return _hopeless(error, reached), False
            if asked:
                return error, False
            begin = (
                f"step {job.keeping.done}" if job.keeping and job.keeping.done else "the beginning"
            )
            say(f"Starting again from {begin} (restart {attempt + 1} of {survival.max_restarts}).")
    raise AssertionError("the loop returns")


def agree_when(asked: list[int], say: Say) -> Callable[[StatusBoard], None]:
    """At every poll: nothing, until a signal has asked for an end. Said here, not where the signal
    is handled, which may be in the middle of another line."""
    announced: list[int] = []

    def agree(board: StatusBoard) -> None:
        if asked:
            announce(asked, announced, say)
            board.agree()

    return agree


def require_steps_left(job: TrainingJob) -> None:
    if job.keeping and job.keeping.done == job.plan.num_steps:
        raise NothingLeft(
            f"All {job.plan.num_steps} steps are done already: {job.keeping.resume}",
            fix="more --steps",
        )


def announce(asked: list[int], announced: list[int], say: Say) -> None:
    if asked and not announced:
        announced.append(asked[0])
        say(
            f"{name_of(asked[0])}: all ranks finish their step and save. Once more to stop at once."
        )


def unsaved(job: TrainingJob) -> RunFailed | None:
    """The error of a training that was stopped in order, and whose last step is not in a checkpoint
    with all of its files. Before the first step there is nothing to save."""
    assert job.keeping
    reached = Recording.read(job.folder.path).reached
    path = step_folder(Path(job.keeping.directory), reached)
    problem = (
        next(
            (each.problem for each in checkpoints(path.parent) if each.path == path),
            "it is not there",
        )
        if reached
        else None
    )
    if problem is None:
        return None
    return RunFailed(
        f"Stopped after {reached} steps, and {path} cannot be used: {problem}.",
        fix="--resume goes on with the one before it",
    )


@contextmanager
def stopping_in_order(enabled: bool, together_seconds: float = 0.0) -> Iterator[list[int]]:
    """The signals that ask for an end, as a list that is empty until the first. With --checkpoint,
    the first Ctrl-C, SIGTERM (a cluster's, or kill), SIGHUP (a closed ssh session), SIGQUIT or
    SIGUSR1 (Slurm's warning before the time limit) saves and stops. A Ctrl-C after it, or the same
    SIGTERM again, stops at once. Signals that come within `together_seconds` count as one: a
    launcher passes on the Ctrl-C that its ranks have seen themselves."""
    asked: list[int] = []
    first: list[float] = []

    def ask(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not asked:
            asked.append(number)
            first.append(now)
            return
        again = number == asked[0] == signal.SIGTERM and now - first[0] > REPEAT_SECONDS
        if (number in TYPED or again) and now - first[0] > together_seconds:
            raise StopSignal(number)

    before: dict[Any, Any] = hear(dict.fromkeys(STOPS, ask)) if enabled else {}
    try:
        yield asked
    finally:
        hear(before)


def set_aside(checkpoint: Checkpoint) -> None:
    """Make room for the same step's next checkpoint. A damaged one is kept under another name; a
    half-written one is nothing."""
    if checkpoint.half_written:
        shutil.rmtree(checkpoint.path, ignore_errors=True)
        return
    number = 1
    while (aside := checkpoint.path.with_name(f"damaged-{checkpoint.path.name}-{number}")).exists():
        number += 1
    checkpoint.path.rename(aside)


def _same(checkpoint: Checkpoint, plan: Plan) -> bool:
    return all(
        checkpoint.manifest["topology"].get(name) == getattr(plan, name) for name in TOPOLOGY
    )


def _last_step(folder: Path, attempt: int) -> int:
    events = read_events(folder, attempt)
    return max(
        (event["step"] for list_ in events.values() for event in list_ if event["event"] == "step"),
        default=-1,
    )


def _progress(
    job: TrainingJob, before: CheckpointPolicy | None, reached: int, reached_before: int
) -> bool:
    """Did the attempt save something new, or at least end elsewhere than the one before it?"""
    saved = job.keeping is not None and before is not None and job.keeping.done > before.done
    return saved or reached != reached_before


def _hopeless(error: RunFailed, reached: int) -> RunFailed:
    where = f"after step {reached}" if reached >= 0 else "before the first step"
    return RunFailed(
        f"{error.problem} It failed {where} twice, without a step in between: starting it again does not help.",
        detail=error.detail,
        fix=error.fix,
    )
