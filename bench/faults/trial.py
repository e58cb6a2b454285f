"""Run one fault trial: start real training, cause the fault, and record how the run ended.

A `Workspace` holds the command and the undisturbed run's weights. A `FaultTrial` is one run in
progress. The functions in `outside.py` and `cluster.py` drive it and return a `FaultOutcome`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.faults.inside import plant
from paralab.errors import RunFailed
from paralab.launch.processes import LAUNCHER
from paralab.machine import child
from paralab.record.events import Event
from paralab.record.reader import read_events, read_failures

STEPS = 24
AT_STEP = 12
EVERY = 4  # steps between checkpoints
DEADLINE_SECONDS = 2  # a step takes 0.04 s
PATIENCE_SECONDS = 120
NUM_RANKS = 2
LAST = NUM_RANKS - 1
COMMON = ["ddp", "--replicas", str(NUM_RANKS), "--steps", str(STEPS), "--save-weights", "--json"]
RESTARTING = [
    *("--checkpoint-every", str(EVERY), "--max-restarts", "2"),
    *("--step-deadline", str(DEADLINE_SECONDS), "--save-deadline", str(DEADLINE_SECONDS)),
]


@dataclass(frozen=True)
class FaultCase:
    """A fault, the affected rank (None if the fault is outside the ranks), and the phase."""

    fault: str
    rank: int | None = None
    phase: str | None = None

    @property
    def where(self) -> str:
        if self.rank is None:
            return ""
        return f"{'rank 0' if self.rank == 0 else 'last rank'}, {self.phase}"


@dataclass(frozen=True)
class FaultOutcome:
    """The outcome of one trial. Seconds count from the fault (None if there was no such event).

    outcome  "recovered", "resumed", "went on", "stopped", or "LOST"
    named    whether the run reported the right cause
    equal    whether the final weights equal the undisturbed run's; None if the run did not finish
    """

    outcome: str
    named: bool
    equal: bool | None
    orphans: int
    noticed_seconds: float | None = None
    next_step_seconds: float | None = None
    steps_lost: int | None = None
    message: str = ""

    @property
    def survived(self) -> bool:
        return (
            self.outcome != "LOST" and self.named and self.equal is not False and not self.orphans
        )


class Workspace:
    """The folder and the command that all trials share."""

    def __init__(
        self,
        folder: Path,
        workload: str,
        options: Sequence[str] = (),
        restarting: Sequence[str] = RESTARTING,
        **environment: str,
    ) -> None:
        self.folder, self.workload, self.number = folder, workload, 0
        self.options, self.restarting, self.environment = options, restarting, environment

    def run_undisturbed(self) -> None:
        """Train once without a fault, and store the weights and the duration."""
        code = self.start("undisturbed", []).wait(PATIENCE_SECONDS)
        if code:
            raise RunFailed(
                f"The undisturbed run failed with code {code}.",
                fix=f"read {self.folder / 'undisturbed.txt'}",
            )

        run = self.folder / "undisturbed"
        self.weights = (run / "weights.pt").read_bytes()
        wall = json.loads((run / "result.json").read_text())["wall_seconds"]
        self.seconds: float = wall - min(list_[0]["time"] for list_ in read_events(run).values())

    def try_fault(
        self, case: FaultCase, cause: Callable[[FaultTrial], FaultOutcome]
    ) -> FaultOutcome:
        self.number += 1
        name = f"{self.number:03d}-{case.fault.replace(' ', '-')}"
        checkpoints = self.folder / f"{name}.checkpoints"
        outcome = cause(FaultTrial(self, case, name, checkpoints))

        # Checkpoints and weights are large; the run folders keep everything else.
        shutil.rmtree(checkpoints, ignore_errors=True)
        for weights in self.folder.glob(f"{name}*/weights.pt"):
            weights.unlink()
        return outcome

    def start(self, name: str, options: list[str], **environment: str) -> subprocess.Popen[bytes]:
        command = child.command("paralab", "run", *COMMON, "--workload", self.workload)
        with (self.folder / f"{name}.txt").open("wb") as log:
            return subprocess.Popen(
                [*command, *self.options, *options, "--out", name],
                cwd=self.folder,
                env={**os.environ, **self.environment, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_restore_ctrl_c,
            )


def _restore_ctrl_c() -> None:
    """Restore SIGINT, which the new process would otherwise ignore under `nohup … &`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class FaultTrial:
    """One trial in progress."""

    workspace: Workspace
    case: FaultCase
    name: str
    checkpoints: Path
    orphans: int = field(default=0)

    @property
    def folder(self) -> Path:
        return self.workspace.folder / self.name

    @property
    def mark(self) -> Path:
        """The file that an injected fault writes just before it happens."""
        return self.workspace.folder.resolve() / f"{self.name}.mark"

    def start(
        self, name: str = "", resume: bool = False, **environment: str
    ) -> subprocess.Popen[bytes]:
        options = ["--checkpoint", str(self.checkpoints.resolve()), *self.workspace.restarting]
        options += ["--resume"] if resume else []
        return self.workspace.start(name or self.name, options, **environment)

    def start_with(self, **injected: object) -> subprocess.Popen[bytes]:
        """Start a run whose ranks inject this fault."""
        return self.start(**plant(self.mark, **injected))

    def end(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the exit code; count and kill the processes that outlive the run."""
        try:
            code = process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()

        _, orphans = psutil.wait_procs(processes_of(process.pid), timeout=3)
        for orphan in orphans:
            orphan.kill()
        self.orphans += len(orphans)
        return code

    def output(self, name: str = "") -> str:
        return (self.workspace.folder / f"{name or self.name}.txt").read_text(errors="replace")

    def error(self) -> str:
        """Return the output line that names the error."""
        lines = self.output().splitlines()
        return next((line for line in lines if line.startswith(("paralab: ", "Rank "))), "")

    def events(self) -> list[Event]:
        return [event for list_ in read_events(self.folder).values() for event in list_]

    def weights_equal(self, name: str = "") -> bool:
        path = self.workspace.folder / (name or self.name) / "weights.pt"
        return path.exists() and path.read_bytes() == self.workspace.weights

    def wait_for_step(self, process: subprocess.Popen[bytes], step: int) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while process.poll() is None and time.monotonic() < until:
            if (self.folder / "events").exists() and any(
                event["event"] == "step" and event["step"] >= step for event in self.events()
            ):
                return
            time.sleep(0.01)

    def resume(self, at: float, named: bool, reached: int | None = None) -> FaultOutcome:
        """Run the same command with --resume after the run has stopped. The fault was at `at`."""
        stopped = time.time()
        name = f"{self.name}-resumed"
        code = self.end(self.start(name, resume=True))

        first, begun = first_step(self.workspace.folder / name, after=at)
        return FaultOutcome(
            outcome="resumed" if code == 0 else "LOST",
            named=named,
            equal=self.weights_equal(name),
            orphans=self.orphans,
            noticed_seconds=stopped - at,
            next_step_seconds=first - at if first else None,
            steps_lost=None if reached is None or begun is None else reached - begun,
            message=self.error(),
        )


def first_step(folder: Path, after: float) -> tuple[float | None, int | None]:
    """Find the first attempt that started after `after`. Return the Unix time when its first step
    ended, and that step's number."""
    ends, begun = [], []
    for events in _attempts(folder):
        start = next((event for event in events if event["event"] == "start"), None)
        steps = [event for event in events if event["event"] == "step"]
        if start and steps and start["unix_seconds"] > after:
            ends.append(start["unix_seconds"] + steps[0]["end"] - start["time"])
            begun.append(steps[0]["step"])
    return (min(ends), min(begun)) if ends else (None, None)


def _attempts(folder: Path) -> Iterator[list[Event]]:
    for attempt in range(len(read_failures(folder)) + 1):
        yield from read_events(folder, attempt).values()


def processes_of(launcher: int) -> list[psutil.Process]:
    """Return the processes with this launcher's pid in their environment. This works even if the
    launcher has died and they have a different parent."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(LAUNCHER) == str(launcher):
                found.append(process)
        except psutil.Error:  # another user's process, or one that has just exited
            continue
    return found
