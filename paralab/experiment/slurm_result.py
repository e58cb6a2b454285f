"""A Slurm job's result, or why it failed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from msgspec.structs import replace

from paralab.analyse.failure import last_lines, root_cause
from paralab.analyse.result import Result, SlurmInfo
from paralab.errors import RunFailed
from paralab.launch import slurm
from paralab.launch.job import Outcome
from paralab.record.events import Error
from paralab.record.reader import read_events
from paralab.record.types import convert, read_object


def read_slurm_result(outcome: Outcome) -> Result:
    """Return the job's own result with Slurm's report; raise RunFailed if there is none."""
    assert outcome.slurm is not None
    if outcome.status != "completed":
        raise explain_slurm_failure(outcome.slurm, outcome.folder.path)
    path = outcome.folder.result_path
    result = convert(read_object(path), Result, path)
    slurm_info = SlurmInfo(**asdict(outcome.slurm))
    return replace(result, run_folder=str(outcome.folder.path), slurm=slurm_info)


def explain_slurm_failure(job: slurm.SlurmJob, run: Path) -> RunFailed:
    """Return an error with Slurm's report, then the error from the rank that failed first, or else
    the last lines of the job's output."""
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
