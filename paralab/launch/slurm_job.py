"""A training as a Slurm job: write the script, submit it, follow it, and bring its result back.
What `paralab run --slurm` does.

Nothing is planned here: the machine from which one submits may have another CPU and no GPU. The job
plans where it runs; its run folder, which must be on a file system that both see, tells how far it
is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paralab.analyse.failure import last_lines, root_cause
from paralab.errors import Interrupted, ParalabError, RunFailed, UsageError
from paralab.experiment.run import Watch, refuse_inside
from paralab.launch import slurm
from paralab.launch.restart import RestartPolicy
from paralab.launch.slurm_script import Allocation, allocation, parse, run_name, script
from paralab.machine import child
from paralab.machine.signals import exit_code_of, name_of, number_of
from paralab.plan.check import check
from paralab.plan.plan import Plan
from paralab.plan.request import Request
from paralab.record.folder import RunFolder, write_new
from paralab.record.reader import read_events
from paralab.workload.reference import check_reference

POLL_SECONDS = 0.2  # of the run's own files
LOOK_SECONDS = (1.0, 5.0)  # of Slurm: at first, and later; its controller serves the whole cluster
SOON_SECONDS = 30.0  # so long is "at first"
STUCK_SECONDS = 10.0  # so long may a job wait for a reason that does not pass by itself, unless --slurm-wait says otherwise
SILENT_SECONDS = 300.0  # so long may the controller give no answer
ARRIVE_SECONDS = 15.0  # so long may a file take to be seen from another machine
KEPT = (
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)  # written into the script where they are set


def dry_run(
    request: Request,
    nodes: int | None,
    options: str,
    out: Path | None,
    save_weights: bool,
    profile: bool,
    tensorboard: Path | None,
    survival: RestartPolicy,
) -> str:
    """The script as one would submit it from here by hand: nothing needs to be there yet."""
    extras = _extras(save_weights, profile, tensorboard)
    return _script(
        request,
        _asked(request, nodes, options),
        out or Path("runs", "slurm"),
        Path.cwd(),
        extras,
        survival,
    )


def run(
    request: Request,
    out: Path | None = None,
    save_weights: bool = False,
    profile: bool = False,
    watch: Watch = lambda plan, folder: lambda: None,
    tensorboard: Path | None = None,
    survival: RestartPolicy | None = None,
    *,
    nodes: int | None,
    options: str,
    wait_seconds: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """As `training.run`, as a job: submit and follow; the result also has what Slurm said of the
    job."""
    asked = _asked(request, nodes, options)
    _require_no_restarts(survival)
    if survival:
        survival.check()
    slurm.require()
    folder = RunFolder.create(out, f"{request.strategy}_slurm")
    path = (folder.path / "job.sbatch").absolute()
    extras = _extras(save_weights, profile, tensorboard)
    write_new(
        path,
        _script(
            request, asked, folder.path, folder.path.absolute(), extras, survival or RestartPolicy()
        ),
    )
    folder.write_manifest(kind="slurm", request=asdict(request), slurm=asdict(asked))
    try:
        number = slurm.submit(path, asked.options)
    except KeyboardInterrupt as error:
        by = number_of(error)
        raise Interrupted(
            f"Stopped by {name_of(by)} while Slurm was asked to take {path}; it may have taken it.",
            fix="squeue --me shows whether there is a job, and scancel JOB ends it",
            exit_code=exit_code_of(by),
        ) from None
    say(f"Slurm job {number} is submitted: {path}")
    following = Following(number, folder, wait_seconds, say, watch)
    try:
        job = following.to_the_end()
    except KeyboardInterrupt as error:
        raise _left(error, number, folder, path) from None
    folder.write_outcome({"slurm": asdict(job), "run": following.run.name})
    if job.state == "COMPLETED":
        return _result(following.run, job, folder)
    raise failure(job, following.run, folder)


def _left(error: KeyboardInterrupt, number: int, folder: RunFolder, path: Path) -> Interrupted:
    """Who stops following a job cancels it. A closed ssh session is no wish to lose it."""
    by = number_of(error)
    stopped = f"Stopped by {name_of(by)}: Slurm job {number}"
    if name_of(by) == "SIGHUP":
        return Interrupted(
            f"{stopped} goes on. The folder is {folder.path}",
            fix=f"scancel {number} ends it",
            exit_code=exit_code_of(by),
        )
    slurm.cancel(number)
    return Interrupted(
        f"{stopped} is cancelled (scancel {number}). The folder is {folder.path}",
        fix=f"`sbatch {path}` submits it again without following it, and `paralab show {folder.path}` reads what it leaves",
        exit_code=exit_code_of(by),
    )


def _asked(request: Request, nodes: int | None, options: str) -> Allocation:
    """What is wrong on whatever machine is refused before anything is submitted."""
    refuse_inside()
    check(request)
    check_reference(request.workload)
    return allocation(request, nodes, parse(options))


def _extras(save_weights: bool, profile: bool, tensorboard: Path | None) -> list[str]:
    """The job leaves what it alone can; the table and the page are made here."""
    extras = ["--save-weights"] * save_weights + ["--profile"] * profile
    return extras + (["--tensorboard", str(tensorboard)] if tensorboard else [])


def _require_no_restarts(survival: RestartPolicy | None) -> None:
    if survival and survival.max_restarts:
        raise UsageError(
            f"--max-restarts {survival.max_restarts}: it is Slurm that starts the ranks of a job.",
            fix="leave it out; with --checkpoint DIR a job that Slurm starts again goes on where it was",
        )


def _script(
    request: Request,
    asked: Allocation,
    runs: Path,
    prints: Path,
    extras: list[str],
    survival: RestartPolicy,
) -> str:
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    command = ["paralab", *sys.argv[1:]]
    options = [*extras, *survival.options(), *(["--resume"] if survival.resume else [])]
    saves = survival.directory is not None
    return script(
        request,
        asked,
        options,
        runs.absolute(),
        prints,
        Path.cwd(),
        child.command("paralab"),
        kept,
        command,
        saves,
    )


class Following:
    """One job, from the queue to its end: says every change once, and shows the training while it
    runs."""

    def __init__(
        self,
        number: int,
        folder: RunFolder,
        wait_seconds: float | None,
        say: Callable[[str], None],
        watch: Watch,
    ) -> None:
        self.number, self.folder, self.wait_seconds = number, folder, wait_seconds
        self.say, self.watch = say, watch
        self.job = slurm.SlurmJob(number, "SUBMITTED")
        self.on_poll: Callable[[], None] | None = None
        self.waits_since = self.stuck_since = self.answered = time.monotonic()

    @property
    def run(self) -> Path:
        """The folder of this start of the job."""
        return self.folder.path / run_name(self.number, self.job.restarts)

    def to_the_end(self) -> slurm.SlurmJob:
        begin, looked, sure = time.monotonic(), float("-inf"), False
        while True:
            now = time.monotonic()
            if now - looked >= LOOK_SECONDS[now - begin > SOON_SECONDS]:
                looked = now
                self._look()
                if self.job.ended:
                    self._show()
                    # A job that lost its node, or had to make room, may be in the queue again a
                    # moment later.
                    if sure or self.job.state not in ("NODE_FAIL", "PREEMPTED"):
                        return self.job
                sure = self.job.ended
                self._give_up_waiting()
            self._show()
            time.sleep(POLL_SECONDS)

    def _look(self) -> None:
        before, now = self.job, time.monotonic()
        try:
            found = slurm.look(self.number)
        except (
            ParalabError
        ) as error:  # controllers are restarted now and then; the job does not care
            if now - self.answered > SILENT_SECONDS:
                raise ParalabError(
                    f"{error.problem} Slurm job {self.number} may still run.",
                    fix=f"scontrol show job {self.number}",
                ) from error
            return
        self.answered = now
        self.job = found or self._forgotten()
        if self.job.restarts != before.restarts:
            self.say(f"Slurm job {self.number} is started again (restart {self.job.restarts})")
            self.on_poll = None
        if self.job.told() != before.told():
            self.say(f"Slurm job {self.number}: {self.job.told()}")
        if self.job.state != "PENDING" or before.state != "PENDING":
            self.waits_since = now
        if self.job.state != "PENDING" or self.job.waiting.normal:
            self.stuck_since = now

    def _forgotten(self) -> slurm.SlurmJob:
        """Slurm forgets a job minutes after its end (MinJobAge); what it left tells how it
        ended."""
        done = (self.run / "result.json").exists()
        return slurm.SlurmJob(
            self.number,
            "COMPLETED" if done else "FAILED",
            nodes=self.job.nodes,
            restarts=self.job.restarts,
        )

    def _give_up_waiting(self) -> None:
        if self.job.state != "PENDING":
            return
        now, patience = time.monotonic(), self.wait_seconds
        waited = now - (self.stuck_since if patience is None else self.waits_since)
        if waited < (STUCK_SECONDS if patience is None else patience):
            return
        slurm.cancel(self.number)
        table = None if self.job.waiting.normal else slurm.offered()
        raise RunFailed(
            f"Slurm job {self.number} did not start in {waited:.0f} s, and is cancelled: PENDING ({self.job.reason}).",
            detail=f"{self.job.reason}: {self.job.waiting.means}."
            + (f"\nThe nodes have:\n{table}" if table else ""),
            fix=f"{self.job.waiting.do}; --slurm-wait SECONDS waits longer, sbatch {self.folder.path}/job.sbatch for ever",
        )

    def _show(self) -> None:
        """What the ranks have written since; from the moment that the job has planned."""
        if self.on_poll is None and (plan := _plan(self.run)):
            self.on_poll = self.watch(plan, RunFolder(self.run))
        if self.on_poll:
            self.on_poll()


def _plan(run: Path) -> Plan | None:
    try:
        return Plan.from_json(json.loads((run / "manifest.json").read_text())["plan"])
    except (OSError, ValueError, KeyError):
        return None


def _result(run: Path, job: slurm.SlurmJob, folder: RunFolder) -> dict[str, Any]:
    path = run / "result.json"
    deadline = time.monotonic() + ARRIVE_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        os.listdir(folder.path)  # a network file system looks again at a folder that is listed
        time.sleep(POLL_SECONDS)
    if not path.exists():
        raise failure(job, run, folder)
    result: dict[str, Any] = json.loads(path.read_text())
    return {**result, "run_folder": str(run), "slurm": asdict(job)}


def failure(job: slurm.SlurmJob, run: Path, folder: RunFolder) -> RunFailed:
    """What Slurm said, then the error of the rank that failed first if there is one, else the last
    that the job printed."""
    prints = folder.path / f"slurm-{job.number}.out"
    words = {
        "limit": job.time_limit,
        "nodes": job.nodes or "its nodes",
        "prints": prints,
        "again": f"sbatch {folder.path}/job.sbatch",
    }
    lost = (
        f"completed, but left no result in {run}",
        f"read {prints}; the folder must be on a file system that the nodes share",
    )
    said, do = (
        lost if job.state == "COMPLETED" else slurm.ENDINGS.get(job.state, slurm.ENDINGS["FAILED"])
    )
    words["code"] = job.exit_code.partition(":")[0]
    detail = (
        last_lines(prints, 12) or f"It has printed nothing: there is no {prints}, or it is empty."
    )
    if any(event["event"] == "error" for events in read_events(run).values() for event in events):
        cause = root_cause(run, [], run / "logs")
        detail = f"Rank {cause.rank}: {cause.what}\n{cause.detail}"
    reason = "" if job.reason in ("None", "") else f", {job.reason}"
    return RunFailed(
        f"Slurm job {job.number} {said.format(**words)} ({job.state}{reason}).",
        detail=detail,
        fix=do.format(**words),
    )


def require_slurm(nodes: int | None, dry: bool, wait_seconds: float | None) -> None:
    """Options of a Slurm job mean nothing without --slurm."""
    given = {"--nodes": nodes, "--dry-run": dry or None, "--slurm-wait": wait_seconds}
    for name in (name for name, value in given.items() if value is not None):
        raise UsageError(
            f"{name} is for Slurm jobs, and --slurm is not given.",
            fix='--slurm partition=NAME,…, or --slurm "" for the default partition',
        )
