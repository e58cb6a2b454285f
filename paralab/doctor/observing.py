"""Running a command as it is, its ranks observed, and saying what is wrong with it while it runs
and at the end.

The command keeps its standard input, output, working folder and exit code. Added to its environment
is one folder on PYTHONPATH (paralab.observe.entrance), through which the observation enters every
Python process that it starts.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paralab.doctor.catalog import apply
from paralab.doctor.events import Cost, Held, Off, Replaced
from paralab.doctor.failures.hangs.failed_ranks import is_for_want_of_a_gpu
from paralab.doctor.failures.hangs.hung_ranks import IDS as HANGS
from paralab.doctor.finding import Finding, ordered
from paralab.doctor.observation import Observation, Reader, waits_since
from paralab.doctor.words_of_ranks import with_exceptions_explained
from paralab.errors import UsageError
from paralab.machine.processes import descendants_of
from paralab.machine.signals import STOPS, hear

ENTRANCE = Path(__file__).parent.parent / "observe" / "entrance"
POLL_SECONDS, LONGEST_SECONDS = 0.2, 1.0
LIVE_SECONDS = 2.0  # between two looks at all that is known so far
SHARE = 0.002  # of a core, which the ranks may need: for reading, and again for the rules
GRACE_SECONDS = 5.0
PASSED_ON = (*STOPS, *([signal.SIGUSR2] if hasattr(signal, "SIGUSR2") else []))
STALL_SECONDS = 60.0


@dataclass(frozen=True)
class Observed:
    """`exit_code`: the command's own; negative: a signal ended it; None with `stopped`: we ended
    it, because a trial was over or it hung for good. `notes`: what a reader must know that is not a
    mistake of the script. `cost`: the share of the ranks' time that observing them took, as they
    measured it; None for less than 64 steps."""

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
    """Run the command; what its ranks do is written down in the folder. `steps`: a trial that is
    ended when every rank has made so many optimizer steps; without a GPU its ranks run on the CPU.
    `say` is called with each finding as soon as it is certain. `end_when_hung` (default: in a trial
    only): ranks that can never go on are ended once the hang has been named."""
    folder.mkdir(parents=True, exist_ok=True)
    job = _start(command, _environment(folder, steps))
    watch = Watch(
        job,
        Reader(folder),
        stall_seconds or STALL_SECONDS,
        say,
        steps is not None if end_when_hung is None else end_when_hung,
    )
    with _passing_signals_on(job):
        try:
            watch.until_the_end()
        finally:
            _end(job, watch.pids())
    code = job.wait()
    final = watch.reader.read(over=True, exit_code=code, ended_by_us=watch.stopped)
    latest = {_same(finding): finding for finding in [*watch.said, *apply("ranks", final)]}
    findings = ordered(with_exceptions_explained(list(latest.values()), final))
    for finding in findings:
        watch.tell(finding)
    costs = [cost.share for rank in final.ranks if (cost := rank.last(Cost)) is not None]
    return Observed(
        findings,
        None if watch.stopped else code,
        folder,
        watch.stopped,
        notes_of(final),
        max(costs, default=None),
    )


class Watch:
    def __init__(
        self,
        job: subprocess.Popen[bytes],
        reader: Reader,
        stall_seconds: float,
        say: Callable[[Finding], None],
        ends: bool,
    ) -> None:
        self.job, self.reader, self.stall_seconds, self.say, self.ends = (
            job,
            reader,
            stall_seconds,
            say,
            ends,
        )
        self.said: list[Finding] = []
        self.stopped = False
        self._found: set[tuple[object, ...]] = set()  # errors of the last look
        self._named: set[tuple[int, float]] = set()  # stalls that were looked into
        self._progress: tuple[int, ...] = ()
        self._began = self._moved = time.monotonic()
        self._next_look = 0.0

    def until_the_end(self) -> None:
        while self.job.poll() is None:
            began = time.thread_time()
            seen = self.reader.read(over=False)
            if self._trial_is_over(seen):
                self._let_go()
            if self.stopped or self._is_hung(seen):
                self.stopped = True
                return
            read = time.thread_time() - began
            self.look(seen)
            self._wait(read / SHARE)

    def _wait(self, seconds: float) -> None:
        """Until the next poll, or the end of the job. The longer it runs, the rarer it is read, if
        reading costs."""
        longest = min(POLL_SECONDS + (time.monotonic() - self._began) / 50, LONGEST_SECONDS)
        with suppress(subprocess.TimeoutExpired):
            self.job.wait(min(max(POLL_SECONDS, seconds), longest))

    def pids(self) -> set[int]:
        return {rank.start.pid for rank in self.reader.read(over=False).ranks if rank.lives}

    def tell(self, finding: Finding) -> None:
        if _same(finding) not in map(_same, self.said):
            self.said.append(finding)
            self.say(finding)

    def look(self, seen: Observation) -> None:
        """What is certain already: found twice, because the first time a rank may be just before
        what explains it (an exception, a reduction). The longer it takes, the rarer it is done."""
        now = time.monotonic()
        if now >= self._next_look and seen.ranks:
            errors = [finding for finding in apply("ranks", seen) if finding.severity == "error"]
            for finding in errors:
                if _same(finding) in self._found:
                    self.tell(finding)
            self._found = set(map(_same, errors))
            self._next_look = time.monotonic() + LIVE_SECONDS + (time.monotonic() - now) / SHARE

    def _trial_is_over(self, seen: Observation) -> bool:
        held = [
            rank
            for rank in seen.ranks
            if rank.lives is not False and isinstance(rank.doing[-1:] and rank.doing[-1], Held)
        ]
        return (
            bool(held)
            and len(seen.ranks) >= seen.world
            and all(rank in held or rank.ended for rank in seen.ranks)
        )

    def _let_go(self) -> None:
        """The ranks wait for this file; then they leave with success, and their launcher with
        them."""
        self.stopped = True
        (self.reader.folder / "stop").touch()
        with suppress(subprocess.TimeoutExpired):
            self.job.wait(GRACE_SECONDS)

    def _is_hung(self, seen: Observation) -> bool:
        """A rank waits for longer than the patience, or none has moved for so long: ask them all,
        name it, once for each stall."""
        progress = tuple(rank.progress for rank in seen.ranks)
        if progress != self._progress:
            self._progress, self._moved = progress, time.monotonic()
        waiting = {
            (rank.rank, since) for rank in seen.ranks if (since := waits_since(rank)) is not None
        }
        late = {
            (rank, since) for rank, since in waiting if time.time() - since > self.stall_seconds
        } - self._named
        still = time.monotonic() - self._moved
        if not late and not (
            seen.ranks and still > self.stall_seconds and (-1, self._moved) not in self._named
        ):
            return False
        self._named |= late | {(-1, self._moved)}
        self.reader.ask()
        stalled = max([still, *(time.time() - since for _, since in late)])
        found = apply("ranks", self.reader.read(over=False, stalled_seconds=stalled))
        for finding in found:
            self.tell(finding)
        for_good = any(finding.severity == "error" and finding.id in HANGS for finding in found)
        return self.ends and for_good


def _same(finding: Finding) -> tuple[object, ...]:
    """What makes two findings one, although the numbers in them have grown meanwhile."""
    return finding.id, finding.file, finding.line, finding.rank


def notes_of(seen: Observation) -> tuple[str, ...]:
    found = [
        f"replaced for the trial: {event.what} by {event.by}"
        for rank in seen.ranks
        for event in rank.of(Replaced)
    ]
    found += [
        f"rank {rank.rank}: the observation switched itself off: {e.error}"
        for rank in seen.ranks
        for e in rank.of(Off)
    ]
    needs = [rank.raised for rank in seen.ranks if rank.raised and is_for_want_of_a_gpu(rank)]
    found += (
        [
            f"this script cannot be tried without a GPU: {needs[0].type}: {needs[0].message.splitlines()[0]}"
        ]
        if needs
        else []
    )
    found += [f"a process could not be observed: {note}" for note in seen.notes]
    if not seen.ranks:
        found.append(
            "no rank was seen: the command started no Python program that trains with torch"
        )
    return tuple(dict.fromkeys(found))


def _environment(folder: Path, steps: int | None) -> dict[str, str]:
    path = [str(ENTRANCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    added = {"PYTHONPATH": os.pathsep.join(path), "PARALAB_OBSERVE": str(folder.resolve())}
    return {**os.environ, **added, **({"PARALAB_TRIAL_STEPS": str(steps)} if steps else {})}


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """In a session of its own: what is typed at the terminal goes to us, and we pass it on. If we
    are killed, it ends too."""
    beside = (
        Path(sys.executable).parent / command[0]
    )  # torchrun of the environment that paralab is in, which need not be active
    if shutil.which(command[0]) is None and beside.is_file():
        command = [str(beside), *command[1:]]
    try:
        return subprocess.Popen(
            command, env=environment, start_new_session=True, preexec_fn=_with_the_parent()
        )
    except FileNotFoundError:
        raise UsageError(
            f"There is no command {command[0]!r} on this machine.",
            fix="an environment with torch: activate it first"
            if command[0] == "torchrun"
            else "paralab doctor -- torchrun --nproc_per_node=2 train.py",
        ) from None
    except PermissionError:
        raise UsageError(
            f"{command[0]} may not be executed.", fix=f"paralab doctor -- python {command[0]}"
        ) from None


def _with_the_parent() -> Callable[[], Any] | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)  # before the fork: nothing may be loaded after it
    return lambda: library.prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG


@contextmanager
def _passing_signals_on(job: subprocess.Popen[bytes]) -> Iterator[None]:
    def pass_on(number: int, frame: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, number)

    before = hear(dict.fromkeys(PASSED_ON, pass_on))
    try:
        yield
    finally:
        hear(before)


def _end(job: subprocess.Popen[bytes], ranks: set[int]) -> None:
    """Ask the command to end, which ends its ranks; then insist, also with ranks that live in
    sessions of their own."""
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
