"""The ranks of one machine as child processes: started together, watched, and ended together, whatever happens.

The ranks meet through a file in a private folder, so there is no port to be taken. Each holds the read end of a pipe whose write
end is ours: if this process dies, even by SIGKILL, they end as well.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paralab.machine.host import loopback
from paralab.plan.plan import Plan
from paralab.plan.request import prefix_words
from paralab.record.folder import RunFolder

INSIDE = "PARALAB_INSIDE"  # set in every process that paralab starts; one of them must not start paralab again
POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0  # between "please stop" and "stop"; after a failure, for the others to notice it themselves


@dataclass(frozen=True)
class Seat:
    """The one rank that is started here, of a job that something else has launched: where it meets the others, over what."""

    rank: int
    meeting: str
    interface: str | None


def launch(
    folder: RunFolder, jobs: list[dict[str, Any]], origin_seconds: float, on_poll: Callable[[], None], seat: Seat | None = None
) -> list[int | None]:
    """Run the jobs one after the other in the same processes, as many as the widest job needs; return the exit codes (None: ended
    by us). A job has a plan, its extras, and the folder for its events. KeyboardInterrupt passes through when all ranks have ended.
    """
    plans = [Plan.from_json(job["plan"]) for job in jobs]
    plan = max(plans, key=lambda plan: plan.world_size)
    plan = replace(plan, environment={name: value for each in plans for name, value in each.environment.items()})
    folder.logs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="paralab-") as private:
        spec = Path(private, "spec.json")
        spec.write_text(
            json.dumps(
                {
                    "meeting": seat.meeting if seat else f"file://{Path(private, 'meeting')}",
                    "origin_seconds": origin_seconds,
                    "jobs": jobs,
                }
            )
        )
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in [plan.ranks[seat.rank]] if seat else plan.ranks:
                interface = seat.interface if seat else loopback()
                ranks.append(_start(folder, spec, plan, rank.rank, rank.local_rank, interface))
            return _watch(ranks, on_poll)
        finally:
            _end(ranks)


def rank_environment(plan: Plan, rank: int, local_rank: int, interface: str | None) -> dict[str, str]:
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
    }
    if interface:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment


def _start(folder: RunFolder, spec: Path, plan: Plan, rank: int, local_rank: int, interface: str | None) -> subprocess.Popen[bytes]:
    prefix = prefix_words(plan.prefix, rank, local_rank) if plan.prefix else []
    with (folder.logs / f"rank{rank}.txt").open("ab") as log:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "paralab.worker", str(spec)],
            env=rank_environment(plan, rank, local_rank, interface),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C in the terminal is for the launcher, which passes it on in order
        )


def _watch(ranks: list[subprocess.Popen[bytes]], on_poll: Callable[[], None]) -> list[int | None]:
    """The exit codes; None for a rank that had to be ended because another one failed: it is not the cause."""
    failed_at: float | None = None
    while True:
        codes = [rank.poll() for rank in ranks]
        on_poll()
        done = [code for code in codes if code is not None]
        if len(done) == len(ranks):
            return codes
        if failed_at is None and any(done):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
            _end(ranks)
            return codes
        time.sleep(POLL_SECONDS)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ask, wait, insist. Also the way out of a Ctrl-C, which must not be interrupted by a second one."""
    before = signal.getsignal(signal.SIGINT)
    in_main = _set_sigint(signal.SIG_IGN)
    try:
        for rank in ranks:
            if rank.poll() is None:
                rank.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for rank in ranks:
            try:
                rank.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
            if rank.stdin:
                rank.stdin.close()
            if hasattr(os, "killpg"):  # what the user's code has forked lives in the rank's own process group
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.pid, signal.SIGKILL)
    finally:
        if in_main:
            _set_sigint(before)


def _set_sigint(handler: Any) -> bool:
    """Signals can be set from the main thread only; elsewhere (a notebook's worker thread) Ctrl-C does not arrive anyway."""
    try:
        signal.signal(signal.SIGINT, handler)
    except ValueError:
        return False
    return True
