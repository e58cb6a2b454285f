"""`paralab run` inside torchrun or srun: the ranks are there already, so they join instead of being
started.

Every launched process starts the one rank that it is, as a child, exactly as on one machine, and
watches it. So what the rank prints goes to its log, its exit code is known, and a rank that hangs
can be ended. Rank 0 plans, makes the run folder, tells the others, and at the end tells the user;
the others say nothing.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from paralab.analyse.recording import Recording
from paralab.errors import ParalabError, RunFailed, UsageError
from paralab.experiment import run as training
from paralab.launch import restart as recovery
from paralab.launch.jobs import TrainingJob, failure
from paralab.launch.launched_by import Joined, meeting_file, own_address, places
from paralab.launch.local import GRACE_SECONDS, Ending, Seat, launch
from paralab.launch.restart import (
    REPEAT_SECONDS,
    RestartPolicy,
    Say,
    announce,
    require_steps_left,
    stopping_in_order,
    unsaved,
)
from paralab.launch.watchdog import Deadlines, Late
from paralab.machine.host import (
    address_towards,
    core_numbers,
    host_mark,
    interface_of,
    loopback,
    usable_cores,
)
from paralab.machine.signals import ENDS, STOPS, StopSignal, exit_code_of, number_of
from paralab.plan.request import Request
from paralab.record.folder import RunFolder
from paralab.record.status_board import NEVER, Post, StatusBoard, next_stop
from paralab.units import plural
from paralab.worker.rendezvous import CONNECT_SECONDS, Lost, Rendezvous, visible_gpus

PLAN_SECONDS = 900  # for rank 0 to look at the workload, longer than it may take for that
SEE_SECONDS = 15  # for a file made by rank 0 to show on another node
ASK_SECONDS = 0.5  # between two questions whether another rank has failed
NOWHERE = ("start", NEVER, 0.0, False)  # a rank that has not said where it is
STOPPED = {exit_code_of(number): number for number in ENDS}
TOLD_SECONDS = 20  # for rank 0 to tell the user, before others end: torchrun ends all when one does


def run(place: Joined, request: Request, **how: Any) -> dict[str, Any]:
    """As `training.run`, in every rank of a job. Returns, or raises what is to be told, in rank 0
    alone; the others end here."""
    how = _again(place, how)
    if place.world_size == 1:
        return training.run(request, **how, team=Team(place, [_facts(place, None)]))
    path = meeting_file(place) if place.address is None else None
    try:
        meeting, address, port = _meet(place, path)
        meeting.put(f"facts/{place.rank}", _facts(place, address))
        if place.rank:
            _follow(place, meeting, _group_at(place, address, port))
        return _lead(place, meeting, (address, port), request, path, how)
    except Lost as error:
        raise ParalabError(
            f"Rank {place.rank} of {place.world_size} ({place.launcher}) did not meet the others: {error}.",
            fix=f"look whether all ranks were started, and whether every node reaches {path or f'{place.address}:{place.port}'}",
        ) from error


def _again(place: Joined, how: dict[str, Any]) -> dict[str, Any]:
    """What is different when the launcher starts the ranks again: they go on, and nothing is
    overwritten."""
    survival, out = how["survival"], how["out"]
    if survival.max_restarts:
        raise UsageError(
            f"--max-restarts {survival.max_restarts}: only {place.launcher}, which launched these ranks, can start them again.",
            fix="torchrun --max-restarts N …, or a Slurm job with --requeue; with --checkpoint DIR they go on where they were",
        )
    if not place.restarts:
        return how
    if out and out.exists():
        out = out.with_name(f"{out.name}-restart{place.restarts}")
    return how | {"out": out, "survival": replace(survival, resume=survival.directory is not None)}


def _meet(place: Joined, path: Path | None) -> tuple[Rendezvous, str, int]:
    """The store of the job, and where it is."""
    prefix = f"paralab/{place.attempt}"
    if path is None:
        assert place.address is not None
        assert place.port is not None
        serve = place.rank == 0 and not place.served
        return Rendezvous.at(place.address, place.port, prefix, serve), place.address, place.port
    if place.rank == 0:
        address = own_address(place)
        meeting = Rendezvous.at(address, 0, prefix, serve=True)
        beside = path.with_name(path.name + ".part")
        try:
            beside.write_text(f"{address} {meeting.port}")
            beside.rename(path)
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written: {error.strerror}.",
                fix="start srun in a folder that can be",
            ) from error
        atexit.register(path.unlink, missing_ok=True)
        return meeting, address, meeting.port
    deadline = time.monotonic() + CONNECT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise Lost(f"{path} did not appear within {CONNECT_SECONDS} s")
        time.sleep(0.05)
    address, port = path.read_text().split()
    return Rendezvous.at(address, int(port), prefix), address, int(port)


def _group_at(place: Joined, address: str, port: int) -> str:
    return f"tcp://{address}:{port}/paralab/{place.attempt}/group"


def _facts(place: Joined, address: str | None) -> dict[str, Any]:
    """What the others must know of this rank."""
    return {
        "rank": place.rank,
        "node": place.node,
        "name": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "machine": host_mark(),
        "local_rank": place.local_rank,
        "gpus": visible_gpus(),
        "cores": usable_cores(),
        "mask": core_numbers(),
        "address": address_towards(address) if address else None,
    }


def _lead(
    place: Joined,
    meeting: Rendezvous,
    where: tuple[str, int],
    request: Request,
    path: Path | None,
    how: dict[str, Any],
) -> dict[str, Any]:
    """Rank 0."""

    def told() -> None:
        sys.stdout.flush()
        meeting.put("told", True)

    atexit.register(told)
    team = None
    try:
        facts = [meeting.get(f"facts/{rank}", CONNECT_SECONDS) for rank in range(place.world_size)]
        if path:
            path.unlink(missing_ok=True)  # all are here
        team = Team(place, facts, meeting, where[0], _group_at(place, *where))
        return training.run(request, **how, team=team)
    except Lost as error:
        meeting.put("work", {"code": 1})
        raise Lost(
            f"rank {str(error).rpartition('/')[2]} did not come within {CONNECT_SECONDS} s"
        ) from error
    except ParalabError as error:
        if team is None or not team.begun:
            meeting.put("work", {"code": error.exit_code})
        raise
    except BaseException:
        if team is None or not team.begun:
            meeting.put("work", {"code": 1})
        raise


class Team:
    """The launched ranks, as rank 0 sees them."""

    def __init__(
        self,
        place: Joined,
        facts: list[dict[str, Any]],
        meeting: Rendezvous | None = None,
        address: str = "",
        group: str = "",
    ) -> None:
        self.place, self.facts, self.meeting, self.address, self.group = (
            place,
            facts,
            meeting,
            address,
            group,
        )
        self.places = places(facts)
        self.begun = False

    def train(
        self,
        job: TrainingJob,
        survival: RestartPolicy,
        on_poll: Callable[[], None],
        origin_seconds: float,
        say: Say,
    ) -> tuple[RunFailed | None, bool]:
        """As `recovery.train`, on all ranks of the job. Who launched them starts them again:
        torchrun, or Slurm."""
        if self.meeting is None:
            return recovery.train(job, survival, on_poll, origin_seconds, say)
        job = replace(job, keeping=survival.begin(job.plan, say))
        require_steps_left(job)
        specs = [job.spec()]
        towards = self._towards()
        self.begun = True
        work = {
            "code": 0,
            "folder": str(job.folder.path.resolve()),
            "jobs": specs,
            "origin": origin_seconds,
            "towards": towards,
            "deadlines": survival.deadlines,
        }
        self.meeting.put("work", work)
        self._check_folder(job.folder)
        own, stopped = _launch(
            self.place,
            self.meeting,
            work,
            Seat(0, self.group, _interface(towards[0])),
            on_poll,
            say,
        )
        if own is None or own.failed:
            self.meeting.put("failed", True)
        ending, gone = self._ends(own, stopped)
        # A rank that has failed waits until the user was told, so it is not for its sake that
        # others are stopped.
        stops = [number for code in ending.codes if (number := STOPPED.get(code or 0))]
        if stops and not gone:
            raise StopSignal(stops[0])
        if not ending.failed and _is_whole(job):
            completed = Recording.read(job.folder.path).status == "completed"
            return (None, False) if completed else (unsaved(job), True)
        error = failure(job, job.folder, ending, gone=gone)
        job.folder.note_failure(0, error.problem, time.time())
        return error, False

    def _towards(self) -> list[str | None]:
        """For every rank, the address of another node: over the interface that leads there it talks
        to the others. None: all ranks are on one node."""
        here = self.places[0].node
        away = [
            fact["address"]
            for fact, place in zip(self.facts, self.places, strict=True)
            if place.node != here
        ]
        return [
            None if not away else away[0] if place.node == here else self.address
            for place in self.places
        ]

    def _check_folder(self, folder: RunFolder) -> None:
        """A node that does not see the folder cannot write its ranks' events there."""
        assert self.meeting is not None
        blind = {
            self.places[rank].node
            for rank in range(1, self.place.world_size)
            if not self._sees(rank)
        }
        self.meeting.put("begin", 2 if blind else 0)
        if blind:
            nodes = f"{plural(len(blind), 'node')} ({', '.join(sorted(blind))})"
            raise UsageError(
                f"{nodes} of this job cannot see the run folder {folder.path.resolve()}, made by rank 0 on {self.places[0].node}.",
                fix="--out DIR on a file system that all nodes share",
            )

    def _sees(self, rank: int) -> bool:
        assert self.meeting is not None
        return bool(self.meeting.get(f"sees/{rank}", SEE_SECONDS * 3))

    def _ends(self, own: Ending | None, stopped: int | None) -> tuple[Ending, list[int]]:
        """How all ranks ended, and those that have not said it."""
        assert self.meeting is not None
        said = [_said(own, stopped and exit_code_of(stopped))]
        gone = []
        deadline = time.monotonic() + (
            CONNECT_SECONDS if own and not own.failed else 3 * GRACE_SECONDS
        )
        for rank in range(1, self.place.world_size):
            try:
                said.append(self.meeting.get(f"ended/{rank}", deadline - time.monotonic()))
            except Lost:
                said.append(_said(None, None))
                gone.append(rank)
        posts = [Post(*note["post"]) for note in said]
        late = [Late(*late) for note in said for late in note["late"]]
        words = {int(rank): text for note in said for rank, text in note["words"].items()}
        return Ending([note["code"] for note in said], posts, late, words=words), gone


def _said(ending: Ending | None, code: int | None) -> dict[str, Any]:
    """What a rank tells the others of its end; `code` where its launcher was stopped, or stopped
    it."""
    if ending is None:
        return {"code": code, "post": list(NOWHERE), "late": [], "words": {}}
    [own], [post] = ending.codes, ending.posts
    where = [post.phase, post.step, post.since, post.waiting]
    return {
        "code": own,
        "post": where,
        "late": [list(late) for late in ending.late],
        "words": ending.words,
    }


def _is_whole(job: TrainingJob) -> bool:
    """On a shared file system the last events of another node may show a little later."""
    deadline = time.monotonic() + SEE_SECONDS
    while Recording.read(job.folder.path).status not in ("completed", "stopped"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _interface(towards: str | None) -> str | None:
    """The network interface for gloo; None: let it choose."""
    if towards is None:
        return loopback()
    own = address_towards(towards)
    return interface_of(own) if own else None


class OtherFailed(Exception):
    """Another rank has failed, and this one has had its time to notice that itself."""


class Others:
    """Asks, now and then, whether another rank has failed."""

    def __init__(self, meeting: Rendezvous) -> None:
        self.meeting = meeting
        self.next = time.monotonic() + ASK_SECONDS
        self.failed_at: float | None = None

    def __call__(self) -> None:
        now = time.monotonic()
        if self.failed_at is not None:
            if now - self.failed_at > GRACE_SECONDS:
                raise OtherFailed
        elif now > self.next:
            self.next = now + ASK_SECONDS
            try:
                failed = self.meeting.has("failed")
            except Lost:  # rank 0 is gone, and the store with it
                failed = True
            if failed:
                self.failed_at = now


def _follow(place: Joined, meeting: Rendezvous, group: str) -> NoReturn:
    """Any other rank: do what rank 0 says, tell how it ended, and leave with the same exit code,
    silently."""
    ending: Ending | None = None
    code: int | None = 1
    try:
        work = meeting.get("work", PLAN_SECONDS)
        code = work["code"]
        if not code:
            meeting.put(f"sees/{place.rank}", _appears(Path(work["folder"], "manifest.json")))
            code = meeting.get("begin", SEE_SECONDS * 4)
        if not code:
            seat = Seat(place.rank, group, _interface(work["towards"][place.rank]))
            ending, stopped = _launch(place, meeting, work, seat)
            code = ending.codes[0] if ending else stopped and exit_code_of(stopped)
    except Lost:
        code = 1
    except KeyboardInterrupt as error:
        code = exit_code_of(number_of(error))
    except BaseException:
        meeting.put(f"ended/{place.rank}", _said(None, 1))
        meeting.put("failed", True)
        raise
    meeting.put(f"ended/{place.rank}", _said(ending, code))
    if code != 0:
        meeting.put("failed", True)
    try:
        if ending or code:
            meeting.get("told", TOLD_SECONDS)
        if code != 0:
            time.sleep(ASK_SECONDS)  # rank 0 ends first, with the code that counts
    except (Lost, KeyboardInterrupt):
        pass
    for number in STOPS:  # torchrun may still pass on that rank 0 has ended; this process is on its way out, and silent
        signal.signal(number, signal.SIG_IGN)
    sys.exit(1 if code is None or code < 0 else code)


def _launch(
    place: Joined,
    meeting: Rendezvous,
    work: dict[str, Any],
    seat: Seat,
    on_poll: Callable[[], None] = lambda: None,
    say: Say = lambda line: None,
) -> tuple[Ending | None, int | None]:
    """Start the one rank that is here, and watch it: (how it ended; None: it was ended because of
    another one, or because this process was stopped; the signal that did that)."""
    others = Others(meeting)

    def poll() -> None:
        on_poll()
        others()

    keeping = work["jobs"][0]["keeping"] is not None
    try:
        with stopping_in_order(keeping, together_seconds=REPEAT_SECONDS) as asked:
            stop = Stopping(place, meeting, asked, say)
            folder = RunFolder(Path(work["folder"]))
            deadlines = Deadlines(*work["deadlines"])
            return launch(
                folder, work["jobs"], work["origin"], poll, deadlines, stop=stop, seat=seat
            ), None
    except OtherFailed:
        return None, None
    except (
        KeyboardInterrupt
    ) as error:  # by the user, or by torchrun because another rank has failed
        return None, number_of(error)


class Stopping:
    """Ranks of several launchers stop together: each tells rank 0's where its rank is, and that one
    says where all stop."""

    def __init__(self, place: Joined, meeting: Rendezvous, asked: list[int], say: Say) -> None:
        self.place, self.meeting, self.asked, self.say = place, meeting, asked, say
        self.announced: list[int] = []
        self.wanted, self.stop_at, self.next = False, NEVER, 0.0

    def __call__(self, board: StatusBoard) -> None:
        announce(self.asked, self.announced, self.say)
        if self.asked and not self.wanted:
            self.wanted = True
            self.meeting.put("stop", True)
        if time.monotonic() < self.next:
            return
        try:
            self.wanted = self.wanted or self.meeting.has("stop")
            self.next = time.monotonic() + (0.0 if self.wanted else ASK_SECONDS)
            if self.wanted:
                self._agree(board)
        except Lost:  # the store is gone, and rank 0 with it: `Others` ends this rank
            self.next = time.monotonic() + ASK_SECONDS

    def _agree(self, board: StatusBoard) -> None:
        post = board.read(self.place.rank)
        self.meeting.put(f"post/{self.place.rank}", [post.step, post.waiting])
        if self.place.rank == 0:
            names = [f"post/{rank}" for rank in range(self.place.world_size)]
            if not all(self.meeting.has(name) for name in names):
                return
            posts = [tuple(self.meeting.get(name, ASK_SECONDS)) for name in names]
            self.stop_at, agreed = next_stop(self.stop_at, posts)
            self.meeting.put("stop_at", [self.stop_at, agreed])
        if self.meeting.has("stop_at"):
            board.stop(*self.meeting.get("stop_at", ASK_SECONDS))


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + SEE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
