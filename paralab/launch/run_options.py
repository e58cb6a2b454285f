"""`RunOptions`: the `paralab run` options that are not part of the configuration."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paralab.errors import UsageError
from paralab.plan.option import check_kind, option, options_of
from paralab.record.checkpoints import DEFAULT_KEEP, checkpoints
from paralab.units import plural

OUTPUT = "Output"
CHECKPOINTS = "Checkpoints and restarts"
DEADLINE: dict[str, Any] = {"default": 600.0, "metavar": "SECONDS"}


class Deadlines(NamedTuple):
    """Limits in seconds: until the first step, for a step, and for the blocking part of a save."""

    start: float = 600.0
    step: float = 600.0
    save: float = 600.0


@dataclass(frozen=True)
class RunOptions:
    out: Path | None = option(
        "The run folder, which must not exist yet.", OUTPUT, shown="runs/DATE_TIME_…"
    )
    save_weights: bool = option(
        "Save the final weights as weights.pt in the run folder.", OUTPUT, default=False
    )
    profile: bool = option(
        "Save a torch.profiler trace of steps 4 to 7 for each rank in the run folder.",
        OUTPUT,
        default=False,
    )
    tensorboard: Path | None = option("Also write TensorBoard logs, in a subfolder of DIR.", OUTPUT)
    checkpoint: Path | None = option(
        "Save checkpoints in DIR at the end and on a signal; --checkpoint-every adds more.",
        CHECKPOINTS,
    )
    checkpoint_every: int | None = option("Save a checkpoint every N steps.", CHECKPOINTS)
    keep_checkpoints: int = option(
        "Keep the N newest checkpoints and delete older ones.", CHECKPOINTS, default=DEFAULT_KEEP
    )
    resume: bool = option(
        "Continue from the last complete checkpoint, with any strategy and number of ranks.",
        CHECKPOINTS,
        default=False,
    )
    max_restarts: int = option("Restart failed ranks up to N times.", CHECKPOINTS, default=0)
    start_deadline: float = option(
        "Stop the run if its first step has not begun after this time.", CHECKPOINTS, **DEADLINE
    )
    step_deadline: float = option(
        "Stop the run if a step takes longer than this.", CHECKPOINTS, **DEADLINE
    )
    save_deadline: float = option(
        "Stop the run if saving a checkpoint blocks training for longer than this.",
        CHECKPOINTS,
        **DEADLINE,
    )

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(self.start_deadline, self.step_deadline, self.save_deadline)

    def leave_restarts_to(self, launcher: str, fix: str) -> None:
        """Reject --max-restarts if another launcher started the ranks."""
        if self.max_restarts:
            problem = f"--max-restarts {self.max_restarts}: only {launcher} can restart these ranks"
            raise UsageError(f"{problem}.", fix=f"{fix}, and resumes with --checkpoint DIR")

    def check(self) -> None:
        """Reject options that contradict each other or the checkpoint folder."""
        if self.checkpoint is None and (self.checkpoint_every is not None or self.resume):
            flag = "--checkpoint-every" if self.checkpoint_every is not None else "--resume"
            raise UsageError(f"{flag} needs a checkpoint folder.", fix=f"{flag} … --checkpoint DIR")
        for each in options_of(RunOptions):
            value, least = getattr(self, each.name), 0 if each.name == "max_restarts" else 1
            check_kind(each, value)
            if each.kind is int and value is not None and value < least:
                problem = f"{each.flag} {value} is less than {least}."
                raise UsageError(problem, fix=f"{each.flag} 3")
            if each.kind is float and not value > 0:
                problem = f"{each.flag} {value:g} is not a positive number of seconds."
                raise UsageError(problem, fix=f"{each.flag} 60")

        if self.checkpoint is None or not self.checkpoint.exists():
            return
        if not self.checkpoint.is_dir():
            raise UsageError(f"--checkpoint {self.checkpoint} is a file.", fix="a folder")
        if not self.resume and (existing := checkpoints(self.checkpoint)):
            content = f"{plural(len(existing), 'checkpoint')}, up to step {existing[-1].step}"
            problem = f"--checkpoint {self.checkpoint} already contains {content}."
            raise UsageError(problem, fix="--resume to continue, or another folder")

    def saved_cuts(self, strategy: str) -> list[str]:
        """Return where the stages begin in the checkpoint to resume from. New measurements could
        move the cuts, so the stages would draw different random numbers than in the interrupted
        run.
        """
        if not self.resume or self.checkpoint is None or not self.checkpoint.is_dir():
            return []
        intact = [each for each in checkpoints(self.checkpoint) if not each.problem]
        topology = intact[-1].manifest["topology"] if intact else {}
        return topology.get("cuts") or [] if topology.get("strategy") == strategy else []
