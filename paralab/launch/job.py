"""What a launcher gets and what it reports: `Launcher.run(job) -> Outcome`.

    local.py         starts the ranks on this machine and restarts them after a failure
    joined_ranks.py  uses the ranks that torchrun or srun has started
    slurm_job.py     submits a Slurm job, in which srun starts the ranks

A launcher reports plain facts. `paralab.experiment` plans before and explains afterwards; where a
launcher needs one of these in between, it calls the function in the job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from paralab.launch.ranks import RankExits
from paralab.launch.run_options import RunOptions
from paralab.launch.slurm import SlurmJob
from paralab.plan.grid import Place
from paralab.plan.plan import Plan
from paralab.plan.request import Request
from paralab.record.checkpoints import CheckpointPolicy
from paralab.record.folder import RunFolder
from paralab.record.reader import read_events, read_status

Print = Callable[[str], None]  # prints one line for the user
Watch = Callable[[Plan, RunFolder], Callable[[], None]]  # returns what to call at every poll


@dataclass(frozen=True)
class Training:
    """One planned training and its run folder.

    extras            what it writes besides its events: name -> path
    case              if one training of a case fails, the others of that case are skipped
    deadline_seconds  after the launch: then neither this training nor a later one is started
    checkpoints       which checkpoints it writes, and which one it starts from
    """

    plan: Plan
    folder: RunFolder
    extras: dict[str, str] = field(default_factory=dict)
    case: str = ""
    deadline_seconds: float | None = None
    checkpoints: CheckpointPolicy | None = None

    @property
    def steps_done(self) -> int:
        """Steps in the checkpoint that it starts from."""
        return self.checkpoints.done if self.checkpoints else 0

    def to_spec(self, deadline_seconds: float | None = None, attempt: int = 0) -> dict[str, Any]:
        """The part of the ranks' `spec.json` about this training."""
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
    """How a run ended.

    status        stopped: the ranks finished a step together, saved, and stopped
    training      None for a Slurm job, which plans where it runs
    exits         how the ranks of the last attempt ended
    signal        the signal that interrupted the run
    stuck_after   the step after which two attempts failed without saving anything in between
    slurm         what Slurm reports about the job
    """

    folder: RunFolder
    status: Literal["completed", "stopped", "failed", "interrupted"]
    training: Training | None = None
    exits: RankExits | None = None
    attempt: int = 0
    wall_seconds: float = 0.0
    signal: int | None = None
    stuck_after: int | None = None
    slurm: SlurmJob | None = None


def conclude(training: Training, exits: RankExits, attempt: int = 0) -> Outcome:
    """The outcome of an attempt, from the exit codes and the events that the ranks wrote."""
    status = read_status(read_events(training.folder.path), training.plan.world_size)
    if exits.failed or status not in ("completed", "stopped"):
        return Outcome(training.folder, "failed", training, exits, attempt)
    ended: Literal["completed", "stopped"] = "completed" if status == "completed" else "stopped"
    return Outcome(training.folder, ended, training, exits, attempt)


@dataclass(frozen=True)
class Job:
    """What a launcher runs.

    prepare  plans for these ranks and creates the run folder; no places: this machine's devices
    explain  says in one sentence why an attempt failed
    watch    shows the progress of a run to the user
    say      prints a line for the user
    """

    request: Request
    options: RunOptions
    prepare: Callable[[Job, Sequence[Place]], Training]
    explain: Callable[[Outcome], str]
    watch: Watch
    say: Print


class Launcher(Protocol):
    def run(self, job: Job) -> Outcome: ...
