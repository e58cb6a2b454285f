"""The launcher for `paralab run --slurm`: write a job script, submit it, and follow the job.

The job plans on its own nodes, because the submitting machine may have a different CPU and no GPU.
We read its progress from the run folder, which must be on a file system that both machines share.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paralab.errors import Interrupted, ParalabError, RunFailed
from paralab.launch import slurm
from paralab.launch.job import Job, Outcome, wait_for_file
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

POLL_SECONDS = 0.2  # time between two reads of the run's files
QUERY_SECONDS = (1.0, 5.0)  # time between queries to Slurm: in the first SOON_SECONDS, and later
SOON_SECONDS = 30.0
STUCK_SECONDS = 10.0  # how long a job may be pending for a reason that waiting cannot fix
SILENT_SECONDS = 300.0  # how long the controller may fail to answer
ARRIVE_SECONDS = 15.0  # how long a file may take to appear from another machine
# Copied into the script if set.
VARIABLES = ("PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class SlurmLauncher:
    """Submits and follows a job. `sbatch` has the --slurm options: `partition=gpu,time=10:00`."""

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
        allocation = self._allocate(request)
        options.leave_restarts_to("Slurm", fix="leave it out; Slurm restarts the job on its own")
        options.check()
        slurm.require_commands()

        folder = RunFolder.create(options.out, f"{request.strategy}_slurm")
        path = (folder.path / "job.sbatch").absolute()
        text = self._script(request, options, allocation, folder.path, folder.path.absolute())
        write_new(path, text)
        folder.write_manifest(kind="slurm", request=asdict(request), slurm=asdict(allocation))
        number: int | None = None
        try:
            number = slurm.submit(path, allocation.options)
            job.say(f"Submitted Slurm job {number}: {path}")
            follower = JobFollower(number, folder, self.wait_seconds, job)
            state = follower.follow()
        except KeyboardInterrupt as error:
            raise _stop_following(number_of(error), number, path) from None
        folder.write("outcome.json", {"slurm": asdict(state), "run": follower.run.name})
        result = follower.run / "result.json"
        done = state.state == "COMPLETED" and wait_for_file(result, ARRIVE_SECONDS)
        return Outcome(RunFolder(follower.run), "completed" if done else "failed", slurm=state)

    def _allocate(self, request: Request) -> Allocation:
        """Return what to request. Reject mistakes that would fail on any machine."""
        refuse_inside()
        check(request)
        check_reference(request.workload)
        return allocate(request, self.nodes, parse_options(self.sbatch))

    def _script(
        self,
        request: Request,
        options: RunOptions,
        allocation: Allocation,
        runs: Path,
        output: Path,
    ) -> str:
        if options.checkpoint:
            options = replace(options, checkpoint=options.checkpoint.absolute())
        return JobScript(
            request=request,
            allocation=allocation,
            words=to_words(replace(options, out=None)),
            runs=runs.absolute(),
            output=output,
            directory=Path.cwd(),
            paralab=child.command("paralab"),
            environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
            command=["paralab", *sys.argv[1:]],
        ).text()


def _stop_following(by: int, number: int | None, script: Path) -> Interrupted:
    """Cancel the job, unless only the ssh session was closed (SIGHUP)."""
    if number is None:
        problem = f" while submitting {script}. Slurm may have accepted it."
        return interrupted(by, problem, "squeue --me to check for a job, and scancel JOB to end it")
    if name_of(by) == "SIGHUP":
        problem = f": Slurm job {number} keeps running. The folder is {script.parent}"
        return interrupted(by, problem, f"scancel {number} to end it")
    slurm.cancel(number)
    problem = f": Slurm job {number} was canceled (scancel {number}). The folder is {script.parent}"
    again = f"`sbatch {script}` to submit it again without following it"
    fix = f"{again}, and `paralab show {script.parent}` to see its results"
    return interrupted(by, problem, fix)


class JobFollower:
    """Follows a job until it finishes, printing each change of state and showing progress."""

    def __init__(
        self, number: int, folder: RunFolder, wait_seconds: float | None, job: Job
    ) -> None:
        self.number, self.folder, self.wait_seconds = number, folder, wait_seconds
        self.say, self.watch = job.say, job.watch
        self.job = slurm.SlurmJob(number, "SUBMITTED")
        self.show_progress: Callable[[], None] | None = None
        self.waiting_since = self.answered = time.monotonic()

    @property
    def run(self) -> Path:
        """The run folder of the job's current start."""
        return self.folder.path / run_name(self.number, self.job.restarts)

    def follow(self) -> slurm.SlurmJob:
        begin, queried, sure = time.monotonic(), float("-inf"), False
        while True:
            now = time.monotonic()
            if now - queried >= QUERY_SECONDS[now - begin > SOON_SECONDS]:
                queried = now
                self._query()
                if self.job.ended:
                    self._show()
                    # Slurm may soon requeue a job that lost its node or was preempted.
                    if sure or self.job.state not in ("NODE_FAIL", "PREEMPTED"):
                        return self.job
                sure = self.job.ended
                self._give_up_waiting()
            self._show()
            time.sleep(POLL_SECONDS)

    def _query(self) -> None:
        """Query Slurm about the job and print changes."""
        before = self.job
        try:
            job = slurm.query(self.number)
        except ParalabError as error:  # the controller may be restarting; the job keeps running
            if time.monotonic() - self.answered > SILENT_SECONDS:
                problem = f"{error.problem} Slurm job {self.number} may still be running."
                raise ParalabError(problem, fix=f"scontrol show job {self.number}") from error
            return

        self.answered = time.monotonic()
        if job is None:  # Slurm forgets a finished job after MinJobAge, but its files remain
            done = (self.run / "result.json").exists()
            job = replace(before, state="COMPLETED" if done else "FAILED", reason="None")
        self.job = job
        if self.job.restarts != before.restarts:
            self.say(f"Slurm restarted job {self.number} (restart {self.job.restarts})")
            self.show_progress = None
        if self.job.describe() != before.describe():
            self.say(f"Slurm job {self.number}: {self.job.describe()}")
        patient = self.wait_seconds is None and self.job.waiting.normal
        if patient or self.job.state != "PENDING" or before.state != "PENDING":
            self.waiting_since = self.answered

    def _give_up_waiting(self) -> None:
        """Cancel a job that has been pending for too long."""
        limit = STUCK_SECONDS if self.wait_seconds is None else self.wait_seconds
        waited = self.answered - self.waiting_since
        if self.job.state != "PENDING" or waited < limit:
            return

        slurm.cancel(self.number)
        waiting = self.job.waiting
        table = None if waiting.normal else slurm.list_nodes()
        nodes = f"\nThe cluster's nodes:\n{table}" if table else ""
        state = f"PENDING ({self.job.reason}) for {waited:.0f} s"
        raise RunFailed(
            f"Canceled Slurm job {self.number}, which was {state}.",
            detail=f"{self.job.reason}: {waiting.means}.{nodes}",
            fix=f"{waiting.do}; --slurm-wait SECONDS waits longer",
        )

    def _show(self) -> None:
        """Show the ranks' progress once the job has a plan."""
        if self.show_progress is None:
            with suppress(OSError, ValueError, KeyError):  # the job has not written its plan yet
                manifest = json.loads((self.run / "manifest.json").read_text())
                plan = Plan.from_json(manifest["plan"])
                self.show_progress = self.watch(plan, RunFolder(self.run))
        if self.show_progress:
            self.show_progress()
