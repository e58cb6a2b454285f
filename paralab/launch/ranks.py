"""Rank processes on this machine: start them together, watch them, and always stop them together.

The ranks rendezvous through a file in a private folder. So there are no port conflicts, and a
failed attempt leaves no files behind. Each rank has the read end of a pipe, and we have the write
end. If this process dies, even from SIGKILL, the ranks exit too.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paralab.errors import naming
from paralab.launch.processes import INSIDE, Child, start
from paralab.launch.run_options import Deadlines
from paralab.launch.watchdog import LateRank, Watchdog
from paralab.machine.host import loopback
from paralab.machine.mps import mps_daemon
from paralab.machine.signals import STOP, STOPS, set_handlers
from paralab.plan.plan import Plan, RankPlan
from paralab.plan.request import prefix_words
from paralab.record.folder import RunFolder
from paralab.record.stack_dump import read_errors
from paralab.record.status_board import LEFT_EARLY, Post, StatusBoard

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0  # time between a stop request and SIGKILL, and for ranks to notice a failure
HUNG_SECONDS = 0.3  # the same for hung ranks, which have already had time to react

OnPoll = Callable[[StatusBoard], None]


@dataclass(frozen=True)
class RankExits:
    """How a launch's ranks exited."""

    codes: list[int | None]  # None if we killed the rank because another rank failed or hung
    posts: list[Post]  # each rank's last phase and step
    late: list[LateRank] = field(
        default_factory=list
    )  # if there are any, all ranks dumped their stacks
    noticed: float = 0.0  # when we noticed the first failure or the hang, as Unix time
    errors: dict[int, str] = field(default_factory=dict)  # by rank; known even if a disk is full
    unknown: tuple[int, ...] = ()  # ranks on other nodes that never reported their exit

    @property
    def failed(self) -> bool:
        return any(self.codes) or None in self.codes


@dataclass(frozen=True)
class Seat:
    """The one rank to start in this process of a torchrun or srun job."""

    rank: int
    rendezvous: str  # where it finds the other ranks
    interface: str | None  # the network interface that it uses


def run_ranks(
    folder: RunFolder,
    specs: list[dict[str, Any]],
    origin_seconds: float,
    on_poll: OnPoll,
    deadlines: Deadlines | None = None,
    seat: Seat | None = None,
) -> RankExits:
    """Train multiple plans one after another in the same processes. Start as many processes as the
    plan with the most ranks needs.

    Each spec comes from `Training.to_spec`. `on_poll` gets the status board, and can use it to
    ask all ranks to stop together. On KeyboardInterrupt, stop all ranks and reraise it.
    """
    plans = [Plan.from_json(spec["plan"]) for spec in specs]
    variables = {name: value for plan in plans for name, value in plan.environment.items()}
    plan = max(plans, key=lambda plan: plan.world_size)
    here = [plan.ranks[seat.rank]] if seat else list(plan.ranks)
    numbers = [rank.rank for rank in here]
    interface = seat.interface if seat else loopback()
    folder.logs.mkdir(exist_ok=True)

    nothing: AbstractContextManager[dict[str, str]] = nullcontext({})
    with (
        mps_daemon() if any(plan.mps for plan in plans) else nothing as mps,
        tempfile.TemporaryDirectory(prefix="paralab-") as name,
    ):
        private = Path(name)
        board = StatusBoard.create(private / "board", plan.world_size)
        task = {
            "rendezvous": seat.rendezvous if seat else f"file://{private / 'rendezvous'}",
            "board": str(private / "board"),
            "dumps": name,
            "origin_seconds": origin_seconds,
            "jobs": specs,
        }
        spec = private / "spec.json"
        with naming(spec):
            spec.write_text(json.dumps(task))

        dumps = folder.stack_dumps(specs[0]["attempt"])
        watchdog = Watchdog(board, numbers, deadlines or Deadlines(), private, dumps)
        ranks: list[Child] = []
        try:
            for rank in here:
                ranks.append(_start(folder, spec, plan, rank, interface, variables | mps))
            exits = _watch(ranks, watchdog, on_poll)
            return replace(exits, errors=read_errors(private, numbers))
        finally:
            _end(ranks)
            _remove_driver_files(ranks)


def _start(
    folder: RunFolder,
    spec: Path,
    plan: Plan,
    rank: RankPlan,
    interface: str | None,
    variables: dict[str, str],
) -> Child:
    environment = {
        **os.environ,
        **variables,
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.local_rank),
        "WORLD_SIZE": str(plan.world_size),
        "OMP_NUM_THREADS": str(plan.threads_per_device),
        INSIDE: f"rank {rank.rank}",
    }
    if interface:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    if plan.device == "cuda":
        # OpenMP threads that spin after each small CPU operation take cores from the threads that
        # launch kernels. Two ranks on one H200 took 56 ms per step instead of 40.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    prefix = prefix_words(plan.prefix, rank.rank, rank.local_rank) if plan.prefix else ()
    own = bool(variables)
    with (folder.logs / f"rank{rank.rank}.txt").open("ab") as log:
        return start("paralab.worker", [str(spec)], environment, log, prefix, own)


def _watch(ranks: list[Child], watchdog: Watchdog, on_poll: OnPoll) -> RankExits:
    """Wait until all ranks have exited. Stop them if a rank fails or hangs."""
    failed_at: float | None = None
    noticed = 0.0
    while True:
        exited = [rank.poll() for rank in ranks]
        # Read the posts after the exit codes, because a rank posts its end before it exits.
        posts = watchdog.posts
        codes = [failure_code(code, post) for code, post in zip(exited, posts, strict=True)]
        on_poll(watchdog.board)
        if failed_at is None and any(codes):
            failed_at, noticed = time.monotonic(), time.time()

        if all(code is not None for code in codes):
            return RankExits(codes, posts, noticed=noticed)
        if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
            _end(ranks)
            return RankExits(codes, posts, noticed=noticed)
        if failed_at is None and (late := watchdog.find_late(codes)):
            noticed = time.time()
            watchdog.dump_stacks(ranks)
            _end(ranks, grace_seconds=HUNG_SECONDS)
            return RankExits(codes, posts, late, noticed)
        time.sleep(POLL_SECONDS)


def failure_code(code: int | None, post: Post) -> int | None:
    """Treat a rank that exits early with code 0 (`os._exit(0)` in user code) as failed."""
    return LEFT_EARLY if code == 0 and post.phase != "end" else code


def _end(ranks: list[Child], grace_seconds: float = GRACE_SECONDS) -> None:
    """Ask the ranks to stop, wait, then kill them. This also runs after Ctrl-C, so other signals
    must not interrupt it. If a signal arrives in the meantime, raise it afterward."""
    unwinding = isinstance(sys.exc_info()[1], KeyboardInterrupt)
    arrived: list[int] = []
    before = set_handlers(dict.fromkeys(STOPS, lambda number, frame: arrived.append(number)))
    try:
        for rank in ranks:
            if rank.poll() is None and rank.stdin:
                with suppress(OSError):
                    rank.stdin.write(STOP)
                    rank.stdin.flush()
        deadline = time.monotonic() + grace_seconds
        for rank in ranks:
            _wait_or_kill(rank, max(0.0, deadline - time.monotonic()))
    finally:
        set_handlers(before)
        if arrived and not unwinding:
            signal.raise_signal(arrived[0])


def _remove_driver_files(ranks: list[Child]) -> None:
    """Remove the CUDA driver's files if a process that shared CUDA events was killed."""
    for rank in ranks:
        for path in Path("/dev/shm").glob(f"cuda.shm.*.{rank.pid:x}.*"):
            path.unlink(missing_ok=True)


def _wait_or_kill(rank: Child, seconds: float) -> None:
    try:
        rank.wait(seconds)
    except subprocess.TimeoutExpired:
        rank.kill()
        # The system cannot kill a process that is waiting for a broken disk.
        with suppress(subprocess.TimeoutExpired):
            rank.wait(GRACE_SECONDS)
    if rank.stdin:
        rank.stdin.close()
    # Processes forked by user code are in the rank's process group.
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)
