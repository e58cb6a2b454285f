"""One trial of a fault: a real run that has it, what was noticed of it, and what came of the run.

Faults in a rank are planted there through the environment (`worker/planted.py`); the others are
done to the run from outside.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paralab.errors import RunFailed
from paralab.launch.processes import LAUNCHER
from paralab.machine import child
from paralab.record.checkpoints import checkpoints
from paralab.record.reader import Event, failures_of, read_events

STEPS = 24
AT_STEP = 12
EVERY = 4
STEP_DEADLINE = 2  # of steps that take 0.04 s
PATIENCE_SECONDS = 120
LAST = 1
NUM_RANKS = 2
COMMON = ["ddp", "--replicas", "2", "--steps", str(STEPS), "--save-weights", "--json"]
SURVIVING = [
    "--checkpoint-every",
    str(EVERY),
    "--max-restarts",
    "2",
    "--step-deadline",
    str(STEP_DEADLINE),
    "--save-deadline",
    "2",
]


@dataclass(frozen=True)
class Cell:
    """A fault, in a rank (None: not in a rank), in a phase."""

    fault: str
    rank: int | None = None
    phase: str | None = None

    @property
    def where(self) -> str:
        return (
            ""
            if self.rank is None
            else f"{'rank 0' if self.rank == 0 else 'last rank'}, {self.phase}"
        )


@dataclass(frozen=True)
class Trial:
    """What came of one fault. Seconds from the fault on; None where there was nothing to notice, or
    no next step."""

    outcome: str  # "recovered", "resumed", "went on", "stopped", or "LOST"
    named: bool  # the right cause was named
    equal: (
        bool | None
    )  # the weights in the end are those of the undisturbed run; None: it was stopped for good
    orphans: int
    noticed_seconds: float | None = None
    next_step_seconds: float | None = None
    steps_lost: int | None = None
    said: str = ""

    @property
    def survived(self) -> bool:
        return (
            self.outcome != "LOST" and self.named and self.equal is not False and not self.orphans
        )


# fault -> what must be said of it when it is had by rank N
IN_RANKS = {
    "kill": "was killed by SIGKILL",
    "segv": "was killed by SIGSEGV",
    "exception": "ValueError: a planted error",
    "exit0": "ended itself with code 0",
    "stop": "is stopped (SIGSTOP",
    "gil": "does not let go of the Python interpreter",
    "memory": "memory",
    "nan": "The loss is nan",
    "slow": "",
}


class Room:
    """A folder for the trials, and the command that all of them use."""

    def __init__(
        self, folder: Path, workload: str, options: Sequence[str] = (), **environment: str
    ) -> None:
        self.folder, self.workload, self.number = folder, workload, 0
        self.options, self.environment = options, environment
        self.surviving = SURVIVING

    def undisturbed(self) -> None:
        done = self._start("undisturbed", []).wait(PATIENCE_SECONDS)
        if done:
            raise RunFailed(
                f"The undisturbed run failed with code {done}.",
                fix=f"read {self.folder / 'undisturbed.txt'}",
            )
        self.weights = (self.folder / "undisturbed" / "weights.pt").read_bytes()
        result = json.loads((self.folder / "undisturbed" / "result.json").read_text())
        begun = min(list_[0]["time"] for list_ in read_events(self.folder / "undisturbed").values())
        self.seconds: float = (
            result["wall_seconds"] - begun
        )  # from the start of the ranks to their end

    def trial(self, cell: Cell, disturb: Callable[[Disturbance], Trial] | None = None) -> Trial:
        self.number += 1
        name = f"{self.number:03d}-{cell.fault.replace(' ', '-')}"
        kept = self.folder / f"{name}.checkpoints"
        disturb = disturb or DISTURBANCES.get(cell.fault, _planted)
        found = disturb(Disturbance(self, cell, name, kept))
        shutil.rmtree(kept, ignore_errors=True)  # they are large, and the run folders tell what was
        for weights in self.folder.glob(f"{name}*/weights.pt"):
            weights.unlink()
        return found

    def _start(self, name: str, options: list[str], **environment: str) -> subprocess.Popen[bytes]:
        command = child.command("paralab", "run", *COMMON, "--workload", self.workload)
        command += [*self.options, *options, "--out", name]
        both = {**os.environ, **self.environment, **environment}
        with (self.folder / f"{name}.txt").open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=both,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_hear_ctrl_c,
            )


def _hear_ctrl_c() -> None:
    """In the new process: if this one was started with `nohup … &`, it would inherit that Ctrl-C is
    ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Disturbance:
    """One trial on its way."""

    room: Room
    cell: Cell
    name: str
    kept: Path
    orphans: int = field(default=0)

    def start(
        self, name: str = "", resume: bool = False, **environment: str
    ) -> subprocess.Popen[bytes]:
        options = [
            "--checkpoint",
            str(self.kept.resolve()),
            *self.room.surviving,
            *(["--resume"] if resume else []),
        ]
        return self.room._start(name or self.name, options, **environment)

    def end(self, process: subprocess.Popen[bytes]) -> int:
        """Its exit code, once all of its processes are gone; those that stay are counted, and
        ended."""
        try:
            code = process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        self.orphans += _orphans(process.pid)
        return code

    def said(self, name: str = "") -> str:
        return (self.room.folder / f"{name or self.name}.txt").read_text(errors="replace")

    def events(self, name: str = "") -> list[Event]:
        found = read_events(self.room.folder / (name or self.name))
        return [event for list_ in found.values() for event in list_]

    def equal(self, name: str = "") -> bool:
        path = self.room.folder / (name or self.name) / "weights.pt"
        return path.exists() and path.read_bytes() == self.room.weights

    def wait_for_step(self, process: subprocess.Popen[bytes], step: int) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        folder = self.room.folder / self.name
        while process.poll() is None and time.monotonic() < until:
            if (folder / "events").exists() and any(
                e["event"] == "step" and e["step"] >= step for e in self.events()
            ):
                return
            time.sleep(0.01)

    def resumed(
        self, at: float, named: bool, outcome: str = "resumed", reached: int | None = None
    ) -> Trial:
        """The same command with --resume, after the run was stopped; `at`: when the fault was."""
        stopped = time.time()
        code = self.end(self.start(f"{self.name}-resumed", resume=True))
        first, begun = _first_step(self.room.folder / f"{self.name}-resumed", after=at)
        lost = None if reached is None or begun is None else reached - begun
        equal = self.equal(f"{self.name}-resumed")
        outcome = outcome if code == 0 else "LOST"
        waited = first - at if first else None
        return Trial(
            outcome, named, equal, self.orphans, stopped - at, waited, lost, _told(self.said())
        )


def _planted(d: Disturbance) -> Trial:
    """A fault in a rank, which the launcher survives by itself; a straggler goes on and is
    named."""
    mark = d.room.folder / f"{d.name}.mark"
    at = (
        0
        if d.cell.fault == "slow"
        else {"start": -1, "step": AT_STEP, "save": AT_STEP}[d.cell.phase or "step"]
    )
    plant = {
        "kind": d.cell.fault,
        "rank": d.cell.rank,
        "phase": d.cell.phase,
        "step": at,
        "mark": str(mark.resolve()),
    }
    code = d.end(d.start(PARALAB_PLANT=json.dumps(plant)))
    folder = d.room.folder / d.name
    if code or not mark.exists():
        return Trial("LOST", False, None, d.orphans, said=_told(d.said()))
    had = json.loads(mark.read_text())
    failures = failures_of(folder)
    if d.cell.fault == "slow":
        straggler = json.loads((folder / "result.json").read_text())["metrics"]["straggler"]
        return Trial(
            "went on", bool(straggler) and straggler["rank"] == d.cell.rank, d.equal(), d.orphans
        )
    problem = failures[0]["problem"] if failures else ""
    first, begun = _first_step(folder, after=had["unix_seconds"])
    return Trial(
        outcome="recovered" if failures else "LOST",
        named=problem.startswith(f"Rank {d.cell.rank} ") and IN_RANKS[d.cell.fault] in problem,
        equal=d.equal(),
        orphans=d.orphans,
        noticed_seconds=failures[0]["unix_seconds"] - had["unix_seconds"] if failures else None,
        next_step_seconds=first - had["unix_seconds"] if first else None,
        steps_lost=max(0, had["step"] - (begun or 0)) if begun is not None else None,
        said=problem,
    )


def _random_kill(d: Disturbance) -> Trial:
    """Any rank, at any moment between its start and the end of the training."""
    dice = random.Random(d.name)
    process = d.start()
    ranks: list[int] = []
    while process.poll() is None and len(ranks) < NUM_RANKS:
        time.sleep(0.01)
        ranks = [each for each in _processes_of(process.pid) if _name(each).startswith("rank ")]
    time.sleep(dice.uniform(0.0, d.room.seconds))
    return _kill(d, process, dice.choice(ranks), "was killed by SIGKILL")


def _template_kill(d: Disturbance) -> Trial:
    """The process from which the ranks were forked. They would go on, but nobody could see how they
    end."""
    process = d.start()
    d.wait_for_step(process, AT_STEP)
    (template,) = [each for each in _processes_of(process.pid) if _name(each).startswith("python")]
    return _kill(d, process, template, "the process that had started all ranks was killed")


def _kill(d: Disturbance, process: subprocess.Popen[bytes], victim: int, said: str) -> Trial:
    at = time.time()
    with suppress(ProcessLookupError):
        if victim in _processes_of(
            process.pid
        ):  # not ended meanwhile, and its number given to another process
            os.kill(victim, signal.SIGKILL)
    code = d.end(process)
    failures = failures_of(d.room.folder / d.name)
    first, _ = _first_step(d.room.folder / d.name, after=at)
    if (
        not failures and code == 0
    ):  # it came just before the end of the process, with everything done
        return Trial("went on", True, d.equal(), d.orphans)
    return Trial(
        outcome="recovered" if code == 0 else "LOST",
        named=bool(failures) and said in failures[0]["problem"],
        equal=d.equal(),
        orphans=d.orphans,
        noticed_seconds=failures[0]["unix_seconds"] - at if failures else None,
        next_step_seconds=first - at if first else None,
        said=failures[0]["problem"] if failures else _told(d.said()),
    )


def _signalled(*signals: int, expected: int) -> Callable[[Disturbance], Trial]:
    def disturb(d: Disturbance) -> Trial:
        process = d.start()
        d.wait_for_step(process, AT_STEP)
        at = time.time()
        for number in signals:
            process.send_signal(number)
            time.sleep(0.02)
        code = d.end(process)
        reached = max(
            (event["step"] + 1 for event in d.events() if event["event"] == "step"), default=0
        )
        return d.resumed(at, named=code == expected, reached=reached)

    return disturb


def _bit_flip(d: Disturbance) -> Trial:
    """Stopped, then a bit of the newest checkpoint turns over while nobody looks."""
    process = d.start()
    d.wait_for_step(process, AT_STEP)
    process.send_signal(signal.SIGTERM)
    d.end(process)
    newest = checkpoints(d.kept)[-1]
    data = max(newest.path.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    at = time.time()
    found = d.resumed(at, named=False, reached=newest.step)
    named = f"{newest.path.name} cannot be used: {data.name} is damaged" in d.said(
        f"{d.name}-resumed"
    )
    return Trial(
        found.outcome,
        named,
        found.equal,
        found.orphans,
        None,
        found.next_step_seconds,
        found.steps_lost,
    )


def _cut_log(d: Disturbance) -> Trial:
    """A rank's event file loses its last bytes while the run goes on."""
    process = d.start()
    d.wait_for_step(process, AT_STEP)
    path = d.room.folder / d.name / "events" / "rank1.jsonl"
    os.truncate(path, max(0, path.stat().st_size - 150))
    code = d.end(process)
    result = json.loads((d.room.folder / d.name / "result.json").read_text()) if code == 0 else {}
    return Trial(
        "went on" if code == 0 else "LOST",
        result.get("reached_step") == STEPS,
        d.equal(),
        d.orphans,
    )


def _disk(d: Disturbance) -> Trial:
    """The disk of the checkpoints is filled up just before the second save is written; then it has
    room again."""
    d.kept.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1g", "paralab", str(d.kept)],
        check=True,
        capture_output=True,
    )
    try:
        mark = d.room.folder / f"{d.name}.mark"
        filler = d.kept.resolve() / "filler"
        plant = {
            "kind": "fill",
            "rank": 0,
            "phase": "write",
            "step": 2 * EVERY,
            "mark": str(mark.resolve()),
            "path": str(filler),
        }
        code = d.end(d.start(PARALAB_PLANT=json.dumps(plant)))
        had = json.loads(mark.read_text()) if mark.exists() else {"unix_seconds": time.time()}
        named = code != 0 and ("No space left" in d.said() or "are free there" in d.said())
        filler.unlink(missing_ok=True)
        return d.resumed(had["unix_seconds"], named, reached=2 * EVERY)
    finally:
        subprocess.run(["umount", "-l", str(d.kept)], check=False, capture_output=True)


DISTURBANCES: dict[str, Callable[[Disturbance], Trial]] = {
    "random": _random_kill,
    "template": _template_kill,
    "disk": _disk,
    "bit flip": _bit_flip,
    "cut log": _cut_log,
    "sigterm": _signalled(signal.SIGTERM, expected=75),
    "sigusr1": _signalled(signal.SIGUSR1, expected=75),
    "ctrl-c": _signalled(signal.SIGINT, expected=75),
    "ctrl-c twice": _signalled(signal.SIGINT, signal.SIGINT, expected=130),
    "launcher": _signalled(signal.SIGKILL, expected=-signal.SIGKILL),
}


def _first_step(folder: Path, after: float) -> tuple[float | None, int | None]:
    """(when, in Unix seconds, the first step ended that began after a moment; the step with which
    that attempt began)."""
    ends, begun = [], []
    for events in _attempts(folder):
        start = next((event for event in events if event["event"] == "start"), None)
        steps = [event for event in events if event["event"] == "step"]
        if start and steps and start["unix_seconds"] > after:
            ends.append(start["unix_seconds"] + steps[0]["end"] - start["time"])
            begun.append(steps[0]["step"])
    return (min(ends), min(begun)) if ends else (None, None)


def _attempts(folder: Path) -> Iterator[list[Event]]:
    for attempt in range(len(failures_of(folder)) + 1):
        yield from read_events(folder, attempt).values()


def _orphans(launcher: int) -> int:
    """Processes of this launcher that outlived it by more than a moment; they are ended."""
    until = time.monotonic() + 3
    while (left := _processes_of(launcher)) and time.monotonic() < until:
        time.sleep(0.05)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return len(left)


def _processes_of(launcher: int) -> list[int]:
    """Those that have this launcher's number in their environment: also when it is gone and they
    have another parent."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{LAUNCHER}={launcher}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _name(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip()
    return ""


def _told(text: str) -> str:
    """The line of a command's output that says what was wrong."""
    lines = [line for line in text.splitlines() if line.startswith(("paralab: ", "Rank "))]
    return lines[0] if lines else ""
