"""The launcher for `paralab run --slurm`: write a job script, submit it, and follow the job.

paralab does not plan here, because the submitting machine may have another CPU and no GPU. The job
plans on its own nodes. We read its progress from the run folder, which must be on a file system
that both machines share.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paralab.errors import Interrupted, ParalabError, RunFailed, UsageError
from paralab.launch import slurm
from paralab.launch.job import Job, Outcome, Print, Watch, wait_for_file
from paralab.launch.launched_by import refuse_inside
from paralab.launch.run_options import RunOptions
from paralab.launch.slurm_script import Allocation, JobScript, allocate, parse_options, run_name
from paralab.machine import child
from paralab.machine.signals import interrupted, name_of, number_of
from paralab.plan.check import check
from paralab.plan.option import to_words
from paralab.plan.plan import Plan
from paralab.plan.request import Request
from paralab.record.folder import RunFolder, write_new
from paralab.workload.reference import check_reference

POLL_SECONDS = 0.2  # between two reads of the run's files
LOOK_SECONDS = (1.0, 5.0)  # between two queries to Slurm: in the first SOON_SECONDS, and later
SOON_SECONDS = 30.0
STUCK_SECONDS = 10.0  # how long to wait if the pending reason will not go away on its own
SILENT_SECONDS = 300.0  # how long the controller may fail to answer
ARRIVE_SECONDS = 15.0  # how long a file may take to appear from another machine
# Copied into the script if set.
VARIABLES = ("PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class SlurmLauncher:
    """Submits and follows a job. `sbatch` has its options: `partition=gpu,time=10:00`."""

    sbatch: str
    nodes: int | None = None
    wait_seconds: float | None = None

    def write_script(self, request: Request, options: RunOptions) -> str:
        """Return the script for `--dry-run`, to submit by hand. This works without Slurm."""
        runs = options.out or Path("runs", "slurm")
        return self._script(request, options, self._allocate(request), runs, Path.cwd())

    def run(self, job: Job) -> Outcome:
        """Submit the job and follow it until it finishes. Any signal except SIGHUP cancels it."""
        request, options = job.request, job.options
        asked = self._allocate(request)
        if options.max_restarts:
            raise UsageError(
                f"--max-restarts {options.max_restarts}: only Slurm can restart a job's ranks.",
                fix="leave it out, and use --checkpoint DIR so that a restarted job resumes",
            )
        options.check()
        slurm.require_commands()

        folder = RunFolder.create(options.out, f"{request.strategy}_slurm")
        path = (folder.path / "job.sbatch").absolute()
        text = self._script(request, options, asked, folder.path, folder.path.absolute())
        write_new(path, text)
        folder.write_manifest(kind="slurm", request=asdict(request), slurm=asdict(asked))
        number: int | None = None
        try:
            number = slurm.submit(path, asked.options)
            job.say(f"Submitted Slurm job {number}: {path}")
            follower = JobFollower(number, folder, self.wait_seconds, job.say, job.watch)
            state = follower.follow()
        except KeyboardInterrupt as error:
            raise _stop_following(number_of(error), number, path) from None
        folder.write_outcome({"slurm": asdict(state), "run": follower.run.name})
        result = follower.run / "result.json"
        done = state.state == "COMPLETED" and wait_for_file(result, ARRIVE_SECONDS)
        return Outcome(RunFolder(follower.run), "completed" if done else "failed", slurm=state)

    def _allocate(self, request: Request) -> Allocation:
        """Return what to request. Refuse mistakes that would fail on any machine."""
        refuse_inside()
        check(request)
        check_reference(request.workload)
        return allocate(request, self.nodes, parse_options(self.sbatch))

    def _script(
        self, request: Request, options: RunOptions, asked: Allocation, runs: Path, prints: Path
    ) -> str:
        if options.checkpoint:
            options = replace(options, checkpoint=options.checkpoint.absolute())
        return JobScript(
            request=request,
            asked=asked,
            words=to_words(replace(options, out=None)),
            runs=runs.absolute(),
            prints=prints,
            where=Path.cwd(),
            paralab=child.command("paralab"),
            environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
            command=["paralab", *sys.argv[1:]],
        ).text()


def _stop_following(by: int, number: int | None, script: Path) -> Interrupted:
    """Cancel the job, unless only the ssh session was closed (SIGHUP)."""
    folder = script.parent
    if number is None:
        return interrupted(
            by,
            f" while submitting {script}. Slurm may have accepted it.",
            fix="squeue --me to check for a job, and scancel JOB to end it",
        )
    if name_of(by) == "SIGHUP":
        return interrupted(
            by,
            f": Slurm job {number} keeps running. The folder is {folder}",
            fix=f"scancel {number} to end it",
        )
    slurm.cancel(number)
    return interrupted(
        by,
        f": Slurm job {number} was canceled (scancel {number}). The folder is {folder}",
        fix=f"`sbatch {script}` to submit it again without following it, and "
        f"`paralab show {folder}` to see its results",
    )


class JobFollower:
    """Follows a job to its end. Prints each change of state once, and shows progress."""

    def __init__(
        self, number: int, folder: RunFolder, wait_seconds: float | None, say: Print, watch: Watch
    ) -> None:
        self.number, self.folder, self.wait_seconds = number, folder, wait_seconds
        self.say, self.watch = say, watch
        self.job = slurm.SlurmJob(number, "SUBMITTED")
        self.show_progress: Callable[[], None] | None = None
        self.waiting_since = self.answered = time.monotonic()

    @property
    def run(self) -> Path:
        """The run folder of the job's current start."""
        return self.folder.path / run_name(self.number, self.job.restarts)

    def follow(self) -> slurm.SlurmJob:
        begin, looked, sure = time.monotonic(), float("-inf"), False
        while True:
            now = time.monotonic()
            if now - looked >= LOOK_SECONDS[now - begin > SOON_SECONDS]:
                looked = now
                self._look()
                if self.job.ended:
                    self._show()
                    # Slurm may soon requeue a job that lost its node or was preempted.
                    if sure or self.job.state not in ("NODE_FAIL", "PREEMPTED"):
                        return self.job
                sure = self.job.ended
                self._give_up_waiting()
            self._show()
            time.sleep(POLL_SECONDS)

    def _look(self) -> None:
        """Query Slurm about the job and print changes."""
        before = self.job
        try:
            job = slurm.query(self.number)
        except ParalabError as error:  # the controller may be restarting; the job keeps running
            if time.monotonic() - self.answered > SILENT_SECONDS:
                raise ParalabError(
                    f"{error.problem} Slurm job {self.number} may still be running.",
                    fix=f"scontrol show job {self.number}",
                ) from error
            return

        self.answered = time.monotonic()
        self.job = job or self._read_ending()
        if self.job.restarts != before.restarts:
            self.say(f"Slurm restarted job {self.number} (restart {self.job.restarts})")
            self.show_progress = None
        if self.job.describe() != before.describe():
            self.say(f"Slurm job {self.number}: {self.job.describe()}")
        patient = self.wait_seconds is None and self.job.waiting.normal
        if patient or self.job.state != "PENDING" or before.state != "PENDING":
            self.waiting_since = self.answered

    def _read_ending(self) -> slurm.SlurmJob:
        """Read the job's files: Slurm forgets a job minutes after it ends (MinJobAge)."""
        done = (self.run / "result.json").exists()
        return replace(self.job, state="COMPLETED" if done else "FAILED", reason="None")

    def _give_up_waiting(self) -> None:
        """Cancel a job that has been pending for too long."""
        limit = STUCK_SECONDS if self.wait_seconds is None else self.wait_seconds
        waited = self.answered - self.waiting_since
        if self.job.state != "PENDING" or waited < limit:
            return

        slurm.cancel(self.number)
        waiting = self.job.waiting
        table = None if waiting.normal else slurm.list_nodes()
        raise RunFailed(
            f"Slurm job {self.number} did not start within {waited:.0f} s and was canceled: "
            f"PENDING ({self.job.reason}).",
            detail=f"{self.job.reason}: {waiting.means}."
            + (f"\nThe cluster's nodes:\n{table}" if table else ""),
            fix=f"{waiting.do}; use --slurm-wait SECONDS to wait longer, or "
            f"sbatch {self.folder.path}/job.sbatch to wait without a limit",
        )

    def _show(self) -> None:
        """Show the ranks' progress once the job has a plan."""
        if self.show_progress is None and (plan := _read_plan(self.run)):
            self.show_progress = self.watch(plan, RunFolder(self.run))
        if self.show_progress:
            self.show_progress()


def _read_plan(run: Path) -> Plan | None:
    try:
        return Plan.from_json(json.loads((run / "manifest.json").read_text())["plan"])
    except (OSError, ValueError, KeyError):
        return None


def require_slurm(nodes: int | None, dry: bool, wait_seconds: float | None) -> None:
    """Raise an error for Slurm options without --slurm."""
    given = {"--nodes": nodes, "--dry-run": dry or None, "--slurm-wait": wait_seconds}
    for name in (name for name, value in given.items() if value is not None):
        raise UsageError(
            f"{name} is for Slurm jobs and needs --slurm.",
            fix='--slurm partition=NAME,…, or --slurm "" for the default partition',
        )
