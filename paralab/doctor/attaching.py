"""A job that stands still now: where each of its ranks is, and who is missing.

Stacks come from, in this order: the rank's own side thread, if the job was started by `paralab
doctor --` (then its collectives are known as well); its memory (doctor.memory), if it runs the same
Python; py-spy, if it is installed (pip install "paralab[attach]"). Nothing is sent to the
processes, and none of them is stopped by us.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paralab.analyse.stack_dumps import LIBRARIES
from paralab.doctor.finding import Finding
from paralab.doctor.memory import Frame, Unreadable, stacks
from paralab.doctor.missing import STOPPED
from paralab.doctor.observation import Reader
from paralab.doctor.place import Place
from paralab.doctor.rules import apply
from paralab.errors import UsageError

LOOK_AGAIN_SECONDS = 0.5
JOB = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "WORLD_SIZE",
    "PARALAB_LAUNCHER",
)  # what its ranks share
# Functions of torch in which a rank waits for the others, in words.
WAITING = {
    "_sync_buffers": "the forward of the DDP model (its buffers)",
    "_engine_run_backward": "a backward pass",
}


@dataclass(frozen=True)
class Attached:
    findings: list[Finding]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RankNow:
    """`stack`: of the main thread, outermost first, or None with `unread`: why. `moves`: it used
    the processor or changed its place between two looks."""

    rank: int
    pid: int
    state: str
    stack: list[Frame] | None
    unread: str | None
    moves: bool

    @property
    def place(self) -> Place | None:
        """The user's innermost line; else the innermost one at all."""
        own = [
            f
            for f in self.stack or []
            if not any(part in f.file for part in LIBRARIES) and not f.file.startswith("<")
        ]
        frame = (own or self.stack or [None])[-1]  # type: ignore[list-item]
        return Place(frame.file, frame.line, frame.function) if frame else None

    @property
    def collective(self) -> str | None:
        """The collective that it is in, as its stack tells."""
        for frame in reversed(self.stack or []):
            if frame.file.endswith("distributed_c10d.py") and not frame.function.startswith(
                ("_", "wrapper")
            ):
                return frame.function
            if frame.function in WAITING:
                return WAITING[frame.function]
        return None

    def told(self) -> str:
        where = f"{self.place}: {self.place.code}" if self.place else "an unknown place"
        waits = f"in {self.collective}, " if self.collective else ""
        return f"rank {self.rank} (process {self.pid}): {waits}at {where}"


def attach(pid: int) -> Attached:
    family = ranks_of(pid)
    folder = next(
        (
            f
            for each in family.values()
            if (f := _environment(each).get("PARALAB_OBSERVE")) and Path(f).is_dir()
        ),
        None,
    )
    if folder:
        return _observed(Path(folder))
    before = {rank: (_cpu(each), _stack(each)) for rank, each in family.items()}
    time.sleep(LOOK_AGAIN_SECONDS)
    ranks = []
    for rank, each in family.items():
        stack, unread = _stack(each)
        moves = _cpu(each) > before[rank][0] + 5 or before[rank][1][0] != stack
        ranks.append(RankNow(rank, each, _state(each), stack, unread, moves))
    world = max(
        int(_environment(each).get("LOCAL_WORLD_SIZE", len(family))) for each in family.values()
    )
    notes = [rank.told() for rank in ranks]
    notes += [
        f"the stack of rank {rank.rank} could not be read: {rank.unread}"
        for rank in ranks
        if rank.unread
    ]
    notes.append(
        "which collectives came before is not known: the job was not started by `paralab doctor -- …`"
    )
    return Attached(judged(ranks, world), tuple(notes))


def _observed(folder: Path) -> Attached:
    reader = Reader(folder)
    reader.read(over=False)
    reader.ask(2.0)
    seen = reader.read(over=False, stalled_seconds=LOOK_AGAIN_SECONDS)
    said = [
        f"rank {rank.rank}: {rank.said.where if rank.said else 'did not answer'}"
        for rank in seen.ranks
    ]
    return Attached(
        apply("ranks", seen),
        (f"the job is observed already ({folder}); its ranks were asked", *said),
    )


def judged(ranks: list[RankNow], world: int) -> list[Finding]:
    """What the stacks alone can tell: certain is only who is not there."""
    waiting = [rank for rank in ranks if rank.collective and not rank.moves]
    if not waiting:
        return []
    first = waiting[0]
    missing = sorted(set(range(world)) - {rank.rank for rank in ranks})
    if missing:
        return [_gone(first, missing, ranks)]
    elsewhere = [rank for rank in ranks if rank.stack is not None and not rank.collective]
    stopped = [rank for rank in ranks if rank.state in STOPPED]
    if stopped or elsewhere:
        return [_elsewhere(first, (stopped or elsewhere)[0], ranks)]
    other = next(
        (
            rank
            for rank in waiting
            if (rank.collective, rank.place) != (first.collective, first.place)
        ),
        None,
    )
    if other is not None:
        return [_different(first, other, ranks)]
    return [_together(first, ranks)] if len(waiting) == len(ranks) > 1 else []


def _finding(
    id: str,
    severity: Any,
    why: str,
    fix: str,
    at: Place | None,
    rank: int | None,
    ranks: list[RankNow],
) -> Finding:
    evidence = tuple(each.told() for each in ranks)
    return Finding(
        id, severity, why, fix, at.file if at else None, at.line if at else None, rank, evidence
    )


def _gone(first: RankNow, missing: list[int], ranks: list[RankNow]) -> Finding:
    return _finding(
        "H02",
        "error",
        f"the process of rank {missing[0]} is no longer there, while rank {first.rank} waits in {first.collective} at "
        f"{first.place}: it "
        "left without an error, or its launcher would have ended the others",
        "let all ranks leave together; what that rank did before shows `paralab doctor -- COMMAND`",
        first.place,
        missing[0],
        ranks,
    )


def _elsewhere(first: RankNow, late: RankNow, ranks: list[RankNow]) -> Finding:
    if late.state in STOPPED:
        why = f"rank {late.rank} {STOPPED[late.state]}"
    else:
        why = f"rank {late.rank} is {'busy' if late.moves else 'still'} at {late.place}"
    if late.state not in STOPPED:
        why += " (certain if it does not come any more: look again)"
    return _finding(
        "H10" if late.state in STOPPED else "H13",
        "error" if late.state in STOPPED else "suspect",
        f"{why}, while rank {first.rank} waits for it in {first.collective} at {first.place}",
        "kill -CONT lets a stopped process go on"
        if late.state in STOPPED
        else "look at what that rank does at this line",
        late.place,
        late.rank,
        ranks,
    )


def _different(first: RankNow, other: RankNow, ranks: list[RankNow]) -> Finding:
    return _finding(
        "H04",
        "suspect",
        f"rank {first.rank} waits in {first.collective} at {first.place}, rank {other.rank} in {other.collective} at "
        f"{other.place}: they "
        "wait for each other in different calls. Which of them should not be there shows a run under observation",
        "call the same collectives in the same order on every rank",
        first.place,
        None,
        ranks,
    )


def _together(first: RankNow, ranks: list[RankNow]) -> Finding:
    return _finding(
        "H10",
        "suspect",
        f"all {len(ranks)} ranks wait in {first.collective} at {first.place}: nobody is missing. Either what lies between them "
        "does not "
        "answer (the network), or they came apart earlier and pair this call with another one; a run under observation would tell",
        "start it as `paralab doctor --stall 60 -- COMMAND`: then every collective is known with its line",
        first.place,
        None,
        ranks,
    )


# --- processes
# -------------------------------------------------------------------------------------------------------------------


def ranks_of(pid: int) -> dict[int, int]:
    """rank -> process, of the job that a process belongs to: a launcher, one of its ranks, or a
    program without a launcher."""
    if not Path(f"/proc/{pid}").exists():
        raise UsageError(
            f"There is no process {pid} on this machine.",
            fix="ps aux | grep train.py shows the processes of a job",
        )
    if job := _job(pid):
        found = {
            int(_environment(each)["RANK"]): each
            for each in sorted(_all(), reverse=True)
            if _job(each) == job
        }
        return dict(sorted(found.items()))
    children = _children()
    family = [pid]
    for each in family:
        family += children.get(each, [])
    ranks = {int(_environment(each)["RANK"]): each for each in reversed(family) if _job(each)}
    if ranks:
        return dict(sorted(ranks.items()))
    trains = [each for each in family if _has_torch(each)]
    spawned = [each for each in trains if each != pid]
    return dict(enumerate(spawned or trains or [pid]))


def _job(pid: int) -> tuple[str, ...] | None:
    """What the ranks of one job have in common; None for one that is none: a shell around a rank, a
    DataLoader's worker."""
    own, parent = _environment(pid), _parent(pid)
    if (
        "RANK" not in own
        or not _is_python(pid)
        or (_is_python(parent) and _environment(parent).get("RANK") == own["RANK"])
    ):
        return None
    return tuple(own.get(name, "") for name in JOB)


def _all() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for pid in sorted(_all()):
        found.setdefault(_parent(pid), []).append(pid)
    return found


def _stat(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else "gone"


def _cpu(pid: int) -> int:
    """Ticks of processor time used."""
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _environment(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    found = {
        name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs
    }
    with suppress(OSError):  # paralab's own ranks are forked: what they are stands in their name
        kind, _, number = Path(f"/proc/{pid}/comm").read_text().strip().partition(" ")
        if kind == "rank" and number.isdigit():
            found["RANK"] = number
    return found


def _is_python(pid: int) -> bool:
    with suppress(OSError):
        return "python" in Path(f"/proc/{pid}/exe").resolve().name
    return False


def _has_torch(pid: int) -> bool:
    with suppress(OSError):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return False


def _stack(pid: int) -> tuple[list[Frame] | None, str | None]:
    """The main thread's frames, or why they cannot be had."""
    try:
        return stacks(pid).get(pid), None
    except Unreadable as error:
        reason = str(error)
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if spy is None:
        return None, f'{reason}; py-spy reads other Pythons as well: pip install "paralab[attach]"'
    told = subprocess.run(
        [spy, "dump", "--json", "--nonblocking", "--pid", str(pid)],
        capture_output=True,
        text=True,
        timeout=20,
    )
    if told.returncode:
        return (
            None,
            f"{reason}; py-spy: {told.stderr.strip().splitlines()[-1] if told.stderr.strip() else 'failed'}",
        )
    threads = json.loads(told.stdout)
    main = next(
        (t for t in threads if t.get("os_thread_id") == pid),
        threads[0] if threads else {"frames": []},
    )
    frames = [
        Frame(f.get("filename") or "", f.get("line") or 0, f.get("name") or "")
        for f in reversed(main["frames"])
    ]
    return frames, None
