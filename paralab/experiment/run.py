"""Perform one run for `paralab run` and `paralab.run`: plan, launch, and read the run folder."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from paralab.analyse.result import Result, SlurmInfo, result_of
from paralab.analyse.trace import trace_of
from paralab.errors import ParalabError, Paused, RunFailed, refusing
from paralab.experiment.explain_failure import explain_failure, explain_slurm_failure
from paralab.experiment.memory import with_memory
from paralab.experiment.planning import create_run, make_plan
from paralab.launch.job import Job, Launcher, Outcome, Print, Training, Watch
from paralab.launch.restart import LocalLauncher
from paralab.launch.run_options import RunOptions
from paralab.launch.slurm import SlurmJob
from paralab.machine.signals import interrupted
from paralab.plan.grid import Place
from paralab.plan.request import Request
from paralab.record.checkpoints import checkpoints, step_folder
from paralab.record.folder import RunFolder
from paralab.record.types import convert, read_object
from paralab.show.tensorboard import require_tensorboard, write_tensorboard
from paralab.units import plural


def run(
    request: Request,
    options: RunOptions | None = None,
    launcher: Launcher | None = None,
    watch: Watch = lambda plan, folder: lambda: None,
    say: Print = lambda line: None,
) -> Result:
    """Train and return the result that `--json` prints. Raise a ParalabError if the run does not
    complete. The run folder is readable even then."""
    options = options or RunOptions()
    job = Job(
        request, options, prepare, lambda outcome: explain_failure(outcome).problem, watch, say
    )
    outcome = (launcher or LocalLauncher()).run(job)
    if outcome.slurm:
        return _read_slurm_result(outcome, outcome.slurm)

    # After a failure, the disk may be full. The user must see the original failure.
    must_write = outcome.status in ("completed", "interrupted")
    result = finish(outcome.folder, outcome.wall_seconds, options.tensorboard, must_write)
    if error := find_error(outcome, result.reached_step):
        raise error
    return result


def _read_slurm_result(outcome: Outcome, job: SlurmJob) -> Result:
    """Return the job's result with Slurm's report. Raise RunFailed if it left none."""
    path = outcome.folder.path
    if outcome.status != "completed":
        raise explain_slurm_failure(job, path)
    file = path / "result.json"
    result = convert(read_object(file), Result, file)
    return replace(result, run_folder=str(path), slurm=SlurmInfo(**vars(job)))


def prepare(job: Job, places: Sequence[Place]) -> Training:
    """Plan the run and create its run folder."""
    options = job.options
    if options.tensorboard:
        require_tensorboard()
        problem = f"--tensorboard {options.tensorboard} cannot be created"
        with refusing(problem, fix="another folder"):
            options.tensorboard.mkdir(parents=True, exist_ok=True)
    options.check()
    cuts = options.saved_cuts(job.request.strategy)
    plan, inspected = make_plan(job.request, places, cuts)
    training = create_run(options.out, with_memory(plan), inspected)
    folder = training.folder.path.resolve()
    names = {"save_weights": "weights.pt", "profile": "profile"}
    extras = {name: str(folder / file) for name, file in names.items() if getattr(options, name)}
    return dataclasses.replace(training, extras=extras)


def find_error(outcome: Outcome, reached: int) -> ParalabError | None:
    """Return the error of a run that ended after `reached` steps, or None if it is complete."""
    assert outcome.training is not None
    steps, path = outcome.training.plan.num_steps, outcome.folder.path
    if outcome.status == "failed":
        return explain_failure(outcome)
    if outcome.status == "interrupted":
        assert outcome.signal is not None
        ended = f"All ranks have ended; the run folder is {path}"
        return interrupted(outcome.signal, f" after {reached} of {plural(steps, 'step')}. {ended}")
    if outcome.status == "stopped":
        done = f"Stopped and saved after {reached}" if reached else "Stopped before the first"
        return find_unsaved(outcome, reached) or Paused(
            f"{done} of {plural(steps, 'step')}; the run folder is {path}",
            fix="run the same command with --resume to continue",
        )
    return None


def find_unsaved(outcome: Outcome, reached: int) -> RunFailed | None:
    """Return the error if the ranks stopped gracefully but did not save an intact checkpoint."""
    assert outcome.training is not None
    assert outcome.training.checkpoints is not None
    path = step_folder(Path(outcome.training.checkpoints.directory), reached)
    saved = {checkpoint.path: checkpoint.problem for checkpoint in checkpoints(path.parent)}
    problem = saved.get(path, "it does not exist")
    if not reached or problem is None:  # paralab saves no checkpoint before the first step
        return None
    after = f"Stopped after {plural(reached, 'step')}"
    unsaved = f"{after}, but {path} cannot be used: {problem}."
    return RunFailed(unsaved, fix="use --resume to continue from the previous checkpoint")


def finish(
    folder: RunFolder,
    wall_seconds: float | None = None,
    tensorboard: Path | None = None,
    must_write: bool = True,
) -> Result:
    """Compute and write the result, no matter how the run ended. A trace that cannot be written
    does not affect the result. With `must_write`, raise an error if the result itself cannot be
    written."""
    result = result_of(folder.path)
    if wall_seconds is not None:
        result = replace(result, wall_seconds=round(wall_seconds, 3))
    try:
        folder.write("result.json", result.to_dict())
    except ParalabError:
        if must_write:
            raise
    try:
        folder.write_trace(trace_of(folder.path))
    except Exception as error:
        result.warnings.append(f"trace.json was not written: {error}")
    try:
        if tensorboard:
            write_tensorboard(folder.path, tensorboard)
    except Exception as error:
        result.warnings.append(f"The TensorBoard files in {tensorboard} were not written: {error}")
    return result
