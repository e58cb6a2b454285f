"""Attach to a hung job: report where each rank is stuck and which rank is missing.

If `paralab doctor --` started the job, a thread in each rank reports its stack and collectives.
Otherwise, py-spy (pip install "paralab[attach]") reads the stacks without pausing the processes.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from paralab.analyse.collective_matching import CollectiveCall, find_mismatches
from paralab.analyse.stack_dumps import STOPPED, Frame
from paralab.doctor.catalog import apply
from paralab.doctor.observation import Reader
from paralab.doctor.place import Place
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Finding
from paralab.errors import UsageError
from paralab.machine import processes

LOOK_AGAIN_SECONDS = 0.5
BUSY_SECONDS = 0.05  # a rank that uses this much CPU time between two samples is running
SPY_SECONDS = 20
SPY_TRIES = 3  # py-spy may read an inconsistent stack from a running process
NO_PERMISSION = (
    "py-spy cannot read this process: use the same user or sudo (macOS always needs sudo), allow "
    "ptrace (sysctl kernel.yama.ptrace_scope=0), or start the container with --cap-add=SYS_PTRACE"
)
# Variables with the same value on all ranks of a job.
JOB = "MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID WORLD_SIZE PARALAB_LAUNCHER".split()
# torch functions in which a rank waits for other ranks, and how to describe them.
WAITING = {
    "_sync_buffers": "the forward of the DDP model (its buffers)",
    "_engine_run_backward": "a backward pass",
}


@dataclass(frozen=True)
class RankNow:
    """What one rank is doing.

    stack   the main thread's frames, outermost first; None if unreadable
    unread  why the stack is unreadable
    moves   whether the rank used the CPU or changed lines between two samples
    """

    rank: int
    pid: int
    state: str
    stack: list[Frame] | None
    unread: str | None
    moves: bool

    @property
    def place(self) -> Place | None:
        """Return the innermost line of user code, or of any code if there is none."""
        stack = self.stack or []
        own = [frame for frame in stack if not frame.is_library and not frame.file.startswith("<")]
        places = [Place(f.file, f.line or 0, f.function) for f in (own or stack)[-1:]]
        return places[0] if places else None

    @property
    def collective(self) -> str | None:
        for frame in reversed(self.stack or []):
            is_public = not frame.function.startswith(("_", "wrapper"))
            if frame.file.endswith("distributed_c10d.py") and is_public:
                return frame.function
            if frame.function in WAITING:
                return WAITING[frame.function]
        return None

    def describe(self) -> str:
        where = f"{self.place}: {self.place.code}" if self.place else "an unknown place"
        waits = f"in {self.collective}, " if self.collective else ""
        return f"rank {self.rank} (process {self.pid}): {waits}at {where}"


Attached = tuple[list[Finding], list[str]]  # findings and notes


def attach(pid: int) -> Attached:
    family = ranks_of(pid)
    environments = [_environment(each) for each in family.values()]
    for environment in environments:
        if (folder := environment.get("PARALAB_OBSERVE")) and Path(folder).is_dir():
            return _ask_observed(Path(folder))

    spy = _find_spy()
    before = {r: (processes.cpu_seconds_of(pid), _stack(spy, pid)) for r, pid in family.items()}
    time.sleep(LOOK_AGAIN_SECONDS)
    ranks = []
    for rank, each in family.items():
        busy_before, (stack_before, _) = before[rank]
        stack, unread = _stack(spy, each)
        busy = processes.cpu_seconds_of(each) - busy_before > BUSY_SECONDS
        state = processes.state_of(each) or "gone"
        ranks.append(RankNow(rank, each, state, stack, unread, busy or stack_before != stack))

    notes = [rank.describe() for rank in ranks]
    for rank_now in ranks:
        if rank_now.unread:
            notes.append(f"cannot read the stack of rank {rank_now.rank}: {rank_now.unread}")
    notes.append("earlier collectives are unknown without `paralab doctor -- COMMAND`")
    return judge(ranks, _expected(family, environments)), notes


def _ask_observed(folder: Path) -> Attached:
    reader = Reader(folder)
    reader.read(over=False)
    reader.ask(2.0)
    seen = reader.read(over=False, stalled_seconds=LOOK_AGAIN_SECONDS)
    notes = [f"paralab already watches this job ({folder}), so its ranks answered"]
    for rank in seen.ranks:
        notes.append(f"rank {rank.rank}: {rank.answer.where if rank.answer else 'did not answer'}")
    return apply("ranks", seen), notes


def judge(ranks: list[RankNow], expected: Iterable[int]) -> list[Finding]:
    """Diagnose a hang from the stacks alone. This is certain only if a rank is missing or stopped.
    `expected` lists the ranks that were started on this machine."""
    now = {rank.rank: rank for rank in ranks}
    calls: dict[int, list[CollectiveCall]] = {number: [] for number in sorted(expected)}
    for rank in ranks:
        if rank.state in STOPPED:
            continue
        if rank.stack is None or (rank.collective and rank.moves):
            del calls[rank.rank]  # its stack is unreadable, or it is not hung
        elif rank.collective:
            site = rank.collective, rank.place
            calls[rank.rank] = [CollectiveCall(rank.collective, None, site=site, is_open=True)]
    waiting = [now[number] for number, own in calls.items() if own]
    if not waiting:
        return []
    evidence = [rank.describe() for rank in ranks]
    for mismatch in find_mismatches(calls):
        if missing := [number for number in mismatch.behind if number not in now]:
            return [_report_missing(waiting[0], missing[0], evidence)]
        if behind := [now[number] for number in mismatch.behind]:
            stopped = [rank for rank in behind if rank.state in STOPPED]
            return [_report_late(waiting[0], (stopped or behind)[0], evidence)]
        one, other = mismatch.pair
        return [_report_different_calls(now[one], now[other], evidence)]
    return [_report_same_call(waiting[0], evidence)] if len(waiting) == len(ranks) > 1 else []


def _report_missing(first: RankNow, missing: int, evidence: list[str]) -> Finding:
    why = (
        f"Rank {missing} exited, but rank {first.rank} waits in {first.collective} at "
        f"{first.place}. It exited without an error; otherwise its launcher would have killed "
        "the other ranks."
    )
    fix = "Make all ranks exit together. `paralab doctor -- COMMAND` shows what that rank did."
    return make_finding("H02", "error", why, first.place, evidence, missing, fix=fix)


def _report_late(first: RankNow, late: RankNow, evidence: list[str]) -> Finding:
    waits = f"while rank {first.rank} waits for it in {first.collective} at {first.place}"
    if late.state in STOPPED:
        why = f"Rank {late.rank} {STOPPED[late.state]}, {waits}."
        fix = "`kill -CONT PID` resumes a stopped process."
        return make_finding("H10", "error", why, late.place, evidence, late.rank, fix=fix)
    doing = "busy" if late.moves else "stuck"
    why = f"Rank {late.rank} is {doing} at {late.place}, {waits}. Attach again to see if it moves."
    fix = "Find out what that rank is doing at this line."
    return make_finding("H13", "suspect", why, late.place, evidence, late.rank, fix=fix)


def _report_different_calls(first: RankNow, other: RankNow, evidence: list[str]) -> Finding:
    why = (
        f"Rank {first.rank} waits in {first.collective} at {first.place}, and rank {other.rank} "
        f"in {other.collective} at {other.place}. The two calls wait for each other. `paralab "
        "doctor -- COMMAND` shows which rank is wrong."
    )
    return make_finding("H04", "suspect", why, first.place, evidence)


def _report_same_call(first: RankNow, evidence: list[str]) -> Finding:
    why = (
        f"All {len(evidence)} ranks wait in {first.collective} at {first.place}, and no rank is "
        "missing. Either the network does not respond, or only some ranks called an earlier "
        "collective, so this call is paired with a different one."
    )
    fix = "`paralab doctor --stall 60 -- COMMAND` records every collective with its line."
    return make_finding("H10", "suspect", why, first.place, evidence, fix=fix)


# --- processes


def ranks_of(pid: int) -> dict[int, int]:
    """Map rank to process id. `pid` is a launcher, a rank, or a program without a launcher."""
    if not psutil.pid_exists(pid):
        raise UsageError(
            f"There is no process {pid} on this machine.",
            fix="ps aux | grep train.py shows the processes of a job",
        )
    if job := _job(pid):
        everyone = sorted(psutil.pids(), reverse=True)
        return _by_rank(each for each in everyone if _job(each) == job)

    family = [pid, *processes.descendants_of(pid)]
    if ranks := _by_rank(each for each in reversed(family) if _job(each)):
        return ranks
    trains = [each for each in family if processes.has_loaded(each, "libtorch")]
    if not trains and all(map(_runs_another_program, family)):
        raise UsageError(
            f"Process {pid} ({processes.name_of(pid)}) is not Python, and started no Python.",
            fix="ps aux | grep train.py shows the processes of a job",
        )
    spawned = [each for each in trains if each != pid]
    return dict(enumerate(spawned or trains or [pid]))


def _runs_another_program(pid: int) -> bool:
    """Return whether a process is certainly not Python. Without permission, that is unknown."""
    try:
        return not processes.is_python(pid) and bool(psutil.Process(pid).exe())
    except psutil.Error:
        return False


def _expected(family: Iterable[int], environments: Iterable[dict[str, str]]) -> set[int]:
    found = set(family)
    for own in environments:
        rank, local, count = (own.get(n, "") for n in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if rank.isdigit() and local.isdigit() and count.isdigit():
            first = int(rank) - int(local)
            found |= set(range(first, first + int(count)))
    return found


def _by_rank(pids: Iterable[int]) -> dict[int, int]:
    """Map rank to process id. If two processes have the same rank, the later one wins."""
    ranks = {int(rank): pid for pid in pids if (rank := _environment(pid).get("RANK"))}
    return dict(sorted(ranks.items()))


def _job(pid: int) -> tuple[str, ...] | None:
    """Return a value that identifies the job and is the same for all its ranks. Return None for a
    process that is not a rank, such as a shell or a DataLoader worker."""
    own = _environment(pid)
    if "RANK" not in own or not processes.is_python(pid):
        return None
    parent = processes.parent_of(pid)
    if parent and processes.is_python(parent) and _environment(parent).get("RANK") == own["RANK"]:
        return None
    return tuple(own.get(name, "") for name in JOB)


def _environment(pid: int) -> dict[str, str]:
    found = processes.environment_of(pid)
    # paralab forks its ranks from a template process and names them `rank 3`. They keep the
    # template's environment.
    kind, _, number = processes.name_of(pid).partition(" ")
    return {**found, "RANK": number} if kind == "rank" and number.isdigit() else found


def _find_spy() -> str:
    found = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if found is None:
        raise UsageError(
            "--attach needs py-spy to read the stacks of other processes, and it is not installed.",
            fix='pip install "paralab[attach]"',
        )
    return found


def _stack(spy: str, pid: int) -> tuple[list[Frame] | None, str | None]:
    """Return the main thread's frames, outermost first, or why they cannot be read."""
    command = [spy, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    error = ""
    for _ in range(SPY_TRIES):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SPY_SECONDS)
        except subprocess.TimeoutExpired:
            return None, f"py-spy did not answer within {SPY_SECONDS} s"
        if done.returncode == 0:
            return _main_frames(json.loads(done.stdout), pid), None
        error = done.stderr.strip()
        if re.search("permission|not permitted|denied|root", error, re.IGNORECASE):
            return None, NO_PERMISSION
    return None, f"py-spy: {error.splitlines()[0] if error else 'failed'}"


def _main_frames(threads: list[dict[str, Any]], pid: int) -> list[Frame]:
    main = [t for t in threads if t["thread_name"] == "MainThread" or t["os_thread_id"] == pid]
    frames = (main or threads)[0]["frames"] if threads else []
    return [
        # py-spy writes `Class.method`, but tracebacks write only `method`.
        Frame(file=frame["filename"], line=frame["line"], function=frame["name"].rpartition(".")[2])
        for frame in reversed(frames)
    ]
