"""A launcher's input and output: `Launcher.run(job) -> Outcome`.

    restart.py       starts the ranks on this machine and restarts them after a failure
    joined_ranks.py  uses the ranks that torchrun or srun started
    slurm_job.py     submits a Slurm job, in which srun starts the ranks

A launcher only reports what happened. `paralab.experiment` provides `job.prepare`, which plans the
run, and `job.explain`, which explains a failed attempt.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paralab.launch.ranks import RankExits
from paralab.launch.run_options import RunOptions
from paralab.launch.slurm import SlurmJob
from paralab.plan.grid import Place
from paralab.plan.plan import Plan
from paralab.plan.request import Request
from paralab.record.checkpoints import CheckpointPolicy
from paralab.record.folder import RunFolder
from paralab.record.reader import RunStatus, read_events, read_status

Print = Callable[[str], None]  # prints a line for the user
Watch = Callable[[Plan, RunFolder], Callable[[], None]]  # returns a function to call at each poll


@dataclass(frozen=True)
class Training:
    """One planned run and its run folder."""

    plan: Plan
    folder: RunFolder
    extras: dict[str, str] = field(default_factory=dict)  # other files to write: name -> path
    case: str = ""  # if one run in a case fails, paralab skips the other runs in that case
    deadline_seconds: float | None = None  # how long after the launch a run may start
    checkpoints: CheckpointPolicy | None = None  # which checkpoints to write, and where to start

    @property
    def steps_done(self) -> int:
        """The number of steps in the checkpoint that the run starts from."""
        return self.checkpoints.done if self.checkpoints else 0

    def to_spec(self, deadline_seconds: float | None = None, attempt: int = 0) -> dict[str, Any]:
        """Return this run's part of the ranks' `spec.json`."""
        return {
            "plan": self.plan.to_json(),
            "events": str(self.folder.events.resolve()),
            "extras": self.extras,
            "checkpoints": asdict(self.checkpoints) if self.checkpoints else None,
            "deadline_seconds": deadline_seconds,
            "attempt": attempt,
        }


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: RunFolder
    status: RunStatus
    training: Training | None = None  # None for a Slurm job, which plans on its own nodes
    exits: RankExits | None = None  # how the last attempt's ranks exited
    attempt: int = 0
    wall_seconds: float = 0.0
    signal: int | None = None  # the signal that interrupted the run
    stuck_after: int | None = None  # the step after which two attempts failed without progress
    slurm: SlurmJob | None = None  # Slurm's report on the job


def conclude(training: Training, exits: RankExits, attempt: int = 0) -> Outcome:
    """Determine the outcome of an attempt from the ranks' exit codes and events."""
    status = read_status(read_events(training.folder.path), training.plan.world_size)
    if exits.failed or status not in ("completed", "stopped"):
        status = "failed"
    return Outcome(training.folder, status, training, exits, attempt)


def wait_for_file(path: Path, seconds: float) -> bool:
    """Wait for a file that another machine writes. Return whether it appears in time."""
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            os.listdir(path.parent.parent)  # makes a network file system refresh the folder
        time.sleep(0.05)
    return path.exists()


@dataclass(frozen=True)
class Job:
    """A launcher's input. `prepare` creates a plan and a run folder for the given places, or for
    this machine if there are none. `explain` says in one sentence why an attempt failed."""

    request: Request
    options: RunOptions
    prepare: Callable[["Job", Sequence[Place]], Training]
    explain: Callable[[Outcome], str]
    watch: Watch  # shows progress to the user
    say: Print


class Launcher(Protocol):
    def run(self, job: Job) -> Outcome: ...
