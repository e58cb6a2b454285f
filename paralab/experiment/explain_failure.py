"""Explain a failed run: the root cause first, then where to read more."""

import errno
import os
import shutil
from pathlib import Path

from paralab.analyse.failure import last_lines, root_cause
from paralab.analyse.hang import find_hang
from paralab.errors import RunFailed
from paralab.launch import slurm
from paralab.launch.job import Outcome, Training
from paralab.launch.ranks import RankExits
from paralab.machine.host import FULL_BYTES
from paralab.record.events import Error
from paralab.record.folder import RunFolder
from paralab.record.reader import read_events
from paralab.units import plural


def explain_failure(outcome: Outcome, launched: RunFolder | None = None) -> RunFailed:
    """Explain a failed run. `launched` is the log folder if it is not the run folder."""
    assert outcome.training is not None
    assert outcome.exits is not None
    explain = _explain_hang if outcome.exits.late else _explain_exit
    error = explain(outcome.training, launched or outcome.folder, outcome.exits, outcome.attempt)
    if (step := outcome.stuck_after) is None:
        return error

    where = f"after step {step}" if step >= 0 else "before the first step"
    stuck = f"It failed twice {where} without progress, so another restart would not help."
    return RunFailed(f"{error.problem} {stuck}", detail=error.detail, fix=error.fix)


def _explain_exit(
    training: Training, launched: RunFolder, exits: RankExits, attempt: int
) -> RunFailed:
    folder = training.folder.path
    cause = root_cause(folder, exits.codes, launched.logs, attempt, exits.unknown, exits.errors)
    full = "" if os.strerror(errno.ENOSPC) in cause.what else _full_disk(training)
    post = exits.posts[cause.rank]
    phases = {
        "start": "before its first step",
        "save": f"while saving after {plural(post.step, 'step')}",
    }
    when = phases.get(post.phase, f"in step {post.step}" if post.step >= 0 else "at the end")
    return RunFailed(
        f"Rank {cause.rank} failed {when}: {cause.what}{full}",
        detail=cause.detail,
        fix=f"read {cause.log} (the run folder is {folder})",
    )


def _full_disk(training: Training) -> str:
    """Check for a full disk, because torch does not report why it could not write a file."""
    saved = [Path(training.checkpoints.directory)] if training.checkpoints else []
    for path in [training.folder.path, *saved]:
        if path.exists() and shutil.disk_usage(path).free < FULL_BYTES:
            return f" ({os.strerror(errno.ENOSPC)}: {path})"
    return ""


def _explain_hang(
    training: Training, launched: RunFolder, exits: RankExits, attempt: int
) -> RunFailed:
    dumps = launched.stack_dumps(attempt)
    hang = find_hang(dumps, training.plan.world_size, [late.rank for late in exits.late])
    first = max(exits.late, key=lambda late: late.seconds)
    phases = {"start": "the start", "save": f"saving after {plural(first.step, 'step')}"}
    what = phases.get(first.phase, f"step {first.step}")

    lines = [f"rank {hang.rank} is at {hang.where}" if hang.where else "", hang.waiting or ""]
    fix = f"--{first.phase}-deadline SECONDS if it only needs more time"
    if hang.mismatch:
        fix = "call the same collectives in the same order on every rank"
    late = f"{what} took {first.seconds:.1f} s, longer than its deadline of {first.deadline:g} s"
    return RunFailed(
        f"Rank {hang.rank} {hang.why}: {late}.",
        detail="\n".join(filter(None, lines)),
        fix=f"{fix}; all stacks are in {dumps}",
    )


def explain_slurm_failure(job: slurm.SlurmJob, run: Path) -> RunFailed:
    """Return Slurm's report with the error of the rank that failed first, or the last output."""
    folder = run.parent
    prints = folder / f"slurm-{job.number}.out"
    problem, fix = slurm.ENDINGS.get(job.state, slurm.ENDINGS["FAILED"])
    if job.state == "COMPLETED":
        problem = f"completed, but left no result in {run}"
        fix = f"read {prints}; the folder must be on a file system that the nodes share"
    words = {
        "limit": job.time_limit,
        "nodes": job.nodes or "its nodes",
        "prints": prints,
        "again": f"sbatch {folder}/job.sbatch",
        "code": job.exit_code.partition(":")[0],
    }

    detail = last_lines(prints, 12) or f"No output: {prints} is missing or empty."
    if any(isinstance(event, Error) for events in read_events(run).values() for event in events):
        cause = root_cause(run, [], run / "logs")
        detail = f"Rank {cause.rank}: {cause.what}\n{cause.detail}"
    reason = "" if job.reason in ("None", "") else f", {job.reason}"
    return RunFailed(
        f"Slurm job {job.number} {problem.format(**words)} ({job.state}{reason}).",
        detail=detail,
        fix=fix.format(**words),
    )
