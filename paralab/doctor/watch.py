"""Run a command, watch its ranks, and report what is wrong while it runs and at the end.

The command keeps its standard input, output, working folder, and exit code. paralab adds only one
folder (paralab.observe.entrance) to PYTHONPATH. Every Python process that the command starts
imports the watching code from there.
"""

import ctypes
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paralab.doctor.catalog import apply
from paralab.doctor.events import Cost, Held, Off, Replaced
from paralab.doctor.failures.hangs.failed_ranks import needs_missing_gpu
from paralab.doctor.failures.hangs.hung_ranks import IDS as HANGS
from paralab.doctor.observation import Observation, Reader
from paralab.doctor.rank_exceptions import with_exceptions_explained
from paralab.doctor.registry import Finding, ordered
from paralab.errors import UsageError
from paralab.machine.processes import descendants_of
from paralab.machine.signals import STOPS, set_handlers

ENTRANCE = Path(__file__).parent.parent / "observe" / "entrance"
POLL_SECONDS, LONGEST_SECONDS = 0.2, 1.0
LIVE_SECONDS = 2.0  # time between runs of the checks
SHARE = 0.002  # use at most this share of a core for reading, and as much again for the checks
GRACE_SECONDS = 5.0
PASSED_ON = (*STOPS, *([signal.SIGUSR2] if hasattr(signal, "SIGUSR2") else []))
STALL_SECONDS = 60.0
Key = tuple[object, ...]
NO_RANKS = "no ranks: the command did not start a Python program that trains with torch"


@dataclass(frozen=True)
class Observed:
    """The result of a watched command.

    exit_code  the command's exit code; negative if a signal killed it; None if we stopped it
    stopped    whether we stopped the command: its trial was over, or it hung for good
    notes      remarks that are not findings
    cost       the share of the ranks' time that watching took, as they measured it; None for fewer
               than 64 steps
    """

    findings: list[Finding]
    exit_code: int | None
    folder: Path
    stopped: bool = False
    notes: tuple[str, ...] = ()
    cost: float | None = None


def observe(
    command: Sequence[str],
    *,
    folder: Path,
    steps: int | None = None,
    stall_seconds: float | None = None,
    say: Callable[[Finding], None] = lambda finding: None,
    end_when_hung: bool | None = None,
) -> Observed:
    """Run the command, whose ranks write events into the folder, and check the events.

    With `steps`, this is a trial, which stops when every rank has run this many optimizer steps. In
    a trial without a GPU, the ranks run on the CPU. `say` gets each finding as soon as it is
    certain. `end_when_hung` (default: only in a trial) kills ranks that can never continue."""
    folder.mkdir(parents=True, exist_ok=True)
    job = _start(command, _environment(folder, steps))
    ends = steps is not None if end_when_hung is None else end_when_hung
    watch = Watch(job, Reader(folder), stall_seconds or STALL_SECONDS, say, ends)
    with _pass_signals_on(job):
        try:
            watch.until_the_end()
        finally:
            _end(job, watch.pids())
    code = job.wait()
    final = watch.reader.read(over=True, exit_code=code, ended_by_us=watch.stopped)
    own = watch.without_consequences(apply("ranks", final), final)
    latest = {_same(finding): finding for finding in [*watch.reported, *own]}
    findings = ordered(with_exceptions_explained(list(latest.values()), final))
    for finding in findings:
        watch.report(finding)
    costs = [cost.share for rank in final.ranks if (cost := rank.last(Cost)) is not None]
    exit_code, share = None if watch.stopped else code, max(costs, default=None)
    return Observed(findings, exit_code, folder, watch.stopped, notes_of(final), share)


@dataclass
class Watch:
    job: subprocess.Popen[bytes]
    reader: Reader
    stall_seconds: float
    say: Callable[[Finding], None]
    ends: bool
    reported: list[Finding] = field(default_factory=list)
    stopped: bool = False
    _found: set[Key] = field(default_factory=set)  # errors from the previous run of the checks
    _named: set[tuple[int, float]] = field(default_factory=set)  # stalls that we have reported
    _hung_at: float = -math.inf  # when we reported why the ranks cannot continue
    _progress: tuple[int, ...] = ()
    _began: float = field(default_factory=time.monotonic)
    _moved: float = field(default_factory=time.monotonic)
    _next_look: float = 0.0

    def until_the_end(self) -> None:
        while self.job.poll() is None:
            began = time.thread_time()
            seen = self.reader.read(over=False)
            if self._trial_is_over(seen):
                self._release_ranks()
            if self.stopped or self._is_hung(seen):
                self.stopped = True
                return
            read = time.thread_time() - began
            self.look(seen)
            self._wait(read / SHARE)

    def _wait(self, seconds: float) -> None:
        """Wait until the next poll or until the job exits. Poll a long or slow run less often."""
        longest = min(POLL_SECONDS + (time.monotonic() - self._began) / 50, LONGEST_SECONDS)
        with suppress(subprocess.TimeoutExpired):
            self.job.wait(min(max(POLL_SECONDS, seconds), longest))

    def pids(self) -> set[int]:
        return {rank.start.pid for rank in self.reader.read(over=False).ranks if rank.lives}

    def report(self, finding: Finding) -> None:
        if _same(finding) not in map(_same, self.reported):
            self.reported.append(finding)
            self.say(finding)
            self._hung_at = time.time() if _is_hang(finding) else self._hung_at

    def without_consequences(self, findings: list[Finding], seen: Observation) -> list[Finding]:
        """Omit further reasons for a hang. There is only one until a launcher restarts the ranks:
        later events, such as another rank that leaves its loop, are consequences."""
        if any(rank.start.t > self._hung_at for rank in seen.ranks):
            return findings
        known = set(map(_same, self.reported))
        return [one for one in findings if _same(one) in known or not _is_hang(one)]

    def look(self, seen: Observation) -> None:
        """Report only errors that the checks find twice in a row. The first time, the event that
        explains the error (an exception, a reduction) may not have arrived yet. Slow checks run
        less often."""
        now = time.monotonic()
        if now >= self._next_look and seen.ranks:
            every = self.without_consequences(apply("ranks", seen), seen)
            errors = [finding for finding in every if finding.severity == "error"]
            for finding in errors:
                if _same(finding) in self._found:
                    self.report(finding)
            self._found = set(map(_same, errors))
            self._next_look = time.monotonic() + LIVE_SECONDS + (time.monotonic() - now) / SHARE

    def _trial_is_over(self, seen: Observation) -> bool:
        living = [rank for rank in seen.ranks if rank.lives is not False and rank.doing]
        held = [rank for rank in living if isinstance(rank.doing[-1], Held)]
        all_done = all(rank in held or rank.ended for rank in seen.ranks)
        return bool(held) and len(seen.ranks) >= seen.world and all_done

    def _release_ranks(self) -> None:
        """Create the file that the ranks wait for, so that the ranks and their launcher exit
        successfully."""
        self.stopped = True
        (self.reader.folder / "stop").touch()
        with suppress(subprocess.TimeoutExpired):
            self.job.wait(GRACE_SECONDS)

    def _is_hung(self, seen: Observation) -> bool:
        """If a rank waits too long, or no rank makes progress, ask all ranks for their stacks and
        report the stall once. Return whether to stop the job."""
        progress = tuple(rank.progress for rank in seen.ranks)
        if progress != self._progress:
            self._progress, self._moved = progress, time.monotonic()
        before = time.time() - self.stall_seconds
        waiting = {(rank.rank, since) for rank in seen.ranks if (since := rank.waits_since)}
        late = {(rank, since) for rank, since in waiting if since < before} - self._named
        still = time.monotonic() - self._moved
        is_new = (-1, self._moved) not in self._named
        if not late and not (seen.ranks and still > self.stall_seconds and is_new):
            return False
        self._named |= late | {(-1, self._moved)}
        self.reader.ask()
        stalled = max([still, *(time.time() - since for _, since in late)])
        seen = self.reader.read(over=False, stalled_seconds=stalled)
        found = self.without_consequences(apply("ranks", seen), seen)
        for finding in found:
            self.report(finding)
        return self.ends and any(map(_is_hang, found))


def _is_hang(finding: Finding) -> bool:
    return finding.severity == "error" and finding.id in HANGS


def _same(finding: Finding) -> Key:
    """Return a key that is the same for findings that differ only in their numbers."""
    return finding.id, finding.file, finding.line, finding.rank


def notes_of(seen: Observation) -> tuple[str, ...]:
    """Return remarks that are not findings: what a trial replaced or could not watch."""
    notes = []
    for rank in seen.ranks:
        notes += [f"replaced for the trial: {e.what} with {e.by}" for e in rank.of(Replaced)]
        notes += [
            f"rank {rank.rank}: watching stopped after an error in paralab: {event.error}"
            for event in rank.of(Off)
        ]
    needs = [rank.raised for rank in seen.ranks if rank.raised and needs_missing_gpu(rank)]
    for raised in needs[:1]:
        first = raised.message.splitlines()[0]
        notes.append(f"this script needs a GPU: {raised.type}: {first}")
    notes += [f"a process could not be watched: {note}" for note in seen.notes]
    if not seen.ranks:
        notes.append(NO_RANKS)
    return tuple(dict.fromkeys(notes))


def _environment(folder: Path, steps: int | None) -> dict[str, str]:
    path = [str(ENTRANCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    added = {"PYTHONPATH": os.pathsep.join(path), "PARALAB_OBSERVE": str(folder.resolve())}
    return {**os.environ, **added, **({"PARALAB_TRIAL_STEPS": str(steps)} if steps else {})}


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the command in its own session. We forward Ctrl-C to it, and Linux terminates it if we
    are killed."""
    program = command[0]
    # Use torchrun from paralab's environment, which may not be active.
    beside = Path(sys.executable).parent / program
    if shutil.which(program) is None and beside.is_file():
        command = [str(beside), *command[1:]]
    try:
        return subprocess.Popen(
            command, env=environment, start_new_session=True, preexec_fn=_end_with_parent()
        )
    except FileNotFoundError:
        fix = "paralab doctor -- torchrun --nproc_per_node=2 train.py"
        if program == "torchrun":
            fix = "an environment with torch: activate it first"
        raise UsageError(f"There is no command {program!r} on this machine.", fix=fix) from None
    except PermissionError:
        fix = f"paralab doctor -- python {program}"
        raise UsageError(f"{program} is not executable.", fix=fix) from None


def _end_with_parent() -> Callable[[], Any] | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)  # load this before the fork, because loading after it is not safe
    return lambda: library.prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG


@contextmanager
def _pass_signals_on(job: subprocess.Popen[bytes]) -> Iterator[None]:
    def pass_on(number: int, frame: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, number)

    before = set_handlers(dict.fromkeys(PASSED_ON, pass_on))
    try:
        yield
    finally:
        set_handlers(before)


def _end(job: subprocess.Popen[bytes], ranks: set[int]) -> None:
    """Ask the command to stop its ranks. Then kill the remaining processes, even in other
    sessions."""
    family = {job.pid, *descendants_of(job.pid), *ranks}
    if job.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            job.wait(GRACE_SECONDS)
    for pid in family:
        with suppress(ProcessLookupError, PermissionError):
            if pid != job.pid or job.poll() is None:
                os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(job.pid, signal.SIGKILL)
