"""The ranks of one machine as child processes: started together, watched, and ended together,
whatever happens.

The ranks meet through a file in a private folder, so there is no port to be taken, and nothing of a
failed attempt is in the way of the next. Each holds the read end of a pipe whose write end is ours:
if this process dies, even by SIGKILL, they end as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paralab.errors import naming
from paralab.launch.processes import INSIDE, LAUNCHER, Child, start
from paralab.launch.watchdog import Deadlines, Late, Watchdog
from paralab.machine.host import loopback
from paralab.machine.signals import STOP, STOPS, hear
from paralab.plan.plan import Plan
from paralab.plan.request import prefix_words
from paralab.record.folder import RunFolder
from paralab.record.stack_dump import read_words
from paralab.record.status_board import LEFT_EARLY, Post, StatusBoard

POLL_SECONDS = 0.05
HUNG_SECONDS = 0.3  # the same for ranks that hang: they have had their deadline
GRACE_SECONDS = (
    3.0  # between "please stop" and "stop"; after a failure, for the others to notice it themselves
)


@dataclass(frozen=True)
class Ending:
    """How the ranks of a launch ended.

    codes  their exit codes; None: ended by us, because another one failed or hung
    posts  where they were last
    late   those that were over their deadline; the testimonies of all are in the run folder then
    noticed  when the first failure, or the hang, was noticed (Unix time); 0 if there was none
    words  rank -> its error, as it left it beside the run folder, whose disk may be full
    """

    codes: list[int | None]
    posts: list[Post]
    late: list[Late]
    noticed: float = 0.0
    words: dict[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(self.codes) or None in self.codes


@dataclass(frozen=True)
class Seat:
    """The one rank that is started here, of a job that something else has launched: where it meets
    the others, over what."""

    rank: int
    meeting: str
    interface: str | None


def launch(
    folder: RunFolder,
    jobs: list[dict[str, Any]],
    origin_seconds: float,
    on_poll: Callable[[], None],
    deadlines: Deadlines | None = None,
    attempt: int = 0,
    stop: Callable[[StatusBoard], None] = lambda board: None,
    seat: Seat | None = None,
) -> Ending:
    """Run the jobs one after the other in the same processes, as many as the widest job needs. A
    job has a plan, its extras, and the folder for its events. `stop` is called at every poll, and
    can ask the ranks, on their board, to stop together before one of their next steps.
    KeyboardInterrupt passes through when all ranks have ended.
    """
    plans = [Plan.from_json(job["plan"]) for job in jobs]
    plan = max(plans, key=lambda plan: plan.world_size)
    plan = replace(
        plan,
        environment={name: value for each in plans for name, value in each.environment.items()},
    )
    folder.logs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="paralab-") as private:
        spec = Path(private, "spec.json")
        board = StatusBoard.create(Path(private, "board"), plan.world_size)
        task = {
            "meeting": seat.meeting if seat else f"file://{Path(private, 'meeting')}",
            "board": str(Path(private, "board")),
            "testimonies": private,
            "origin_seconds": origin_seconds,
            "jobs": jobs,
        }
        with naming(spec):
            spec.write_text(json.dumps(task))
        ranks: list[Child] = []
        try:
            here = [plan.ranks[seat.rank]] if seat else list(plan.ranks)
            interface = seat.interface if seat else loopback()
            for rank in here:
                ranks.append(_start(folder, spec, plan, rank.rank, rank.local_rank, interface))
            watchdog = Watchdog(
                board,
                [rank.rank for rank in here],
                deadlines or Deadlines(),
                Path(private),
                folder.testimonies(attempt),
            )
            ending = _watch(ranks, watchdog, on_poll, stop)
            return replace(ending, words=read_words(Path(private), [rank.rank for rank in here]))
        finally:
            _end(ranks)


def rank_environment(
    plan: Plan, rank: int, local_rank: int, interface: str | None
) -> dict[str, str]:
    """What torchrun would set, the plan's threads, and what the plan's precision needs."""
    environment = {
        **os.environ,
        **plan.environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(plan.world_size),
        "OMP_NUM_THREADS": str(plan.threads_per_device),
        "PYTHONUNBUFFERED": "1",
        INSIDE: f"rank {rank}",
        LAUNCHER: str(os.getpid()),
    }
    if interface:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment


def _start(
    folder: RunFolder, spec: Path, plan: Plan, rank: int, local_rank: int, interface: str | None
) -> Child:
    prefix = prefix_words(plan.prefix, rank, local_rank) if plan.prefix else []
    with (folder.logs / f"rank{rank}.txt").open("ab") as log:
        environment = rank_environment(plan, rank, local_rank, interface)
        return start(
            "paralab.worker", [str(spec)], environment, log, prefix, own=bool(plan.environment)
        )


def _watch(
    ranks: list[Child],
    watchdog: Watchdog,
    on_poll: Callable[[], None],
    stop: Callable[[StatusBoard], None],
) -> Ending:
    """Until all ranks have ended, by themselves or by us."""
    failed_at: float | None = None
    noticed = 0.0
    while True:
        ended = [rank.poll() for rank in ranks]
        posts = watchdog.posts  # read after the codes: a rank posts its end before it ends
        codes = [_judged(code, post) for code, post in zip(ended, posts, strict=True)]
        on_poll()
        if failed_at is None and any(codes):
            failed_at, noticed = time.monotonic(), time.time()
        if all(code is not None for code in codes):
            return Ending(codes, posts, [], noticed)
        if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
            _end(ranks)
            return Ending(codes, posts, [], noticed)
        if failed_at is None and (late := watchdog.late(codes)):
            noticed = time.time()
            watchdog.question(ranks)
            _end(ranks, grace_seconds=HUNG_SECONDS)
            return Ending(codes, posts, late, noticed)
        stop(watchdog.board)
        time.sleep(POLL_SECONDS)


def _judged(code: int | None, post: Post) -> int | None:
    """A rank that left before its end, with code 0 (`os._exit(0)` in the user's code), has failed
    all the same."""
    return LEFT_EARLY if code == 0 and post.phase != "end" else code


def _end(ranks: list[Child], grace_seconds: float = GRACE_SECONDS) -> None:
    """Ask, wait, insist. Also the way out of a Ctrl-C, which must not be interrupted by a second
    one. A first one that comes meanwhile is not lost."""
    unwinding = isinstance(sys.exc_info()[1], KeyboardInterrupt)
    came: list[int] = []
    before = hear(dict.fromkeys(STOPS, lambda number, frame: came.append(number)))
    try:
        for rank in ranks:
            if rank.poll() is None and rank.stdin:
                with suppress(OSError):
                    rank.stdin.write(STOP)
                    rank.stdin.flush()
        deadline = time.monotonic() + grace_seconds
        for rank in ranks:
            try:
                rank.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()
                with suppress(
                    subprocess.TimeoutExpired
                ):  # it waits for a disk that does not answer, and cannot be ended
                    rank.wait(GRACE_SECONDS)
            if rank.stdin:
                rank.stdin.close()
            if hasattr(
                os, "killpg"
            ):  # what the user's code has forked lives in the rank's own process group
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.pid, signal.SIGKILL)
    finally:
        hear(before)
        if came and not unwinding:
            signal.raise_signal(came[0])
