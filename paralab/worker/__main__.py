"""Run one rank: read the specification, join the other ranks, train, and exit with a clear status.

python -m paralab.worker SPEC.json          (started by paralab.launch; RANK says which rank)
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # Imported objects stay alive, but scanning them for garbage takes a third of the import time.
    gc.disable()

import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from paralab.errors import ParalabError
from paralab.machine.host import name_process
from paralab.machine.signals import leave_to_the_launcher
from paralab.plan.plan import Plan
from paralab.record.checkpoints import CheckpointPolicy
from paralab.record.stack_dump import write_error
from paralab.record.status_board import NEVER, StatusBoard
from paralab.record.victims import is_victim
from paralab.record.writer import EventWriter
from paralab.worker.groups import make_groups
from paralab.worker.loop import Extras, train
from paralab.worker.measure.clock import ALIGNED, Offset, offset_to_rank_0
from paralab.worker.processes.parent_watch import obey_the_launcher
from paralab.worker.processes.rendezvous import join_group
from paralab.workload.load import load_workload, their_lines
from paralab.workload.reference import user_folder
from paralab.workload.workload import Workload

EXIT_CODES = {"completed": 0, "stopped": 0, "failed": 1, "interrupted": 130}
STOP_SECONDS = 0.5  # the launcher stops all ranks within this time


class Stopped(BaseException):
    """The launcher asked this rank to stop."""


def main() -> NoReturn:
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    name_process(f"rank {rank}")  # otherwise `ps` shows the parent's command line
    leave_to_the_launcher(_raise_if_stopping)
    dump = Path(spec["dumps"], f"rank{rank}")
    obey_the_launcher(dump, _stop)

    status = "completed"
    try:
        _train_all(spec, rank)
    except Stopped:
        status = "interrupted"
    except BaseException as error:
        status = "failed"
        write_error(dump, error)
        with suppress(OSError):  # the log may be on a full disk
            traceback.print_exc()

    uses_nccl = any("nccl" in (job["plan"]["backend"] or "") for job in spec["jobs"])
    if status == "completed" and uses_nccl:
        dist.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # Do not use sys.exit. After a failure, pipeline and gloo threads wait forever for other ranks.
    # After a success, gloo threads sometimes abort while Python shuts down ("terminate called
    # without an active exception").
    os._exit(EXIT_CODES[status])


def _train_all(spec: dict[str, Any], rank: int) -> None:
    """Run the jobs one at a time in these processes. Ranks that are not part of a job wait."""
    plans = [Plan.from_json(job["plan"]) for job in spec["jobs"]]
    jobs = list(zip(plans, spec["jobs"], strict=True))
    world_size = int(os.environ["WORLD_SIZE"])
    board = StatusBoard(Path(spec["board"]), world_size)
    offset = ALIGNED
    if world_size > 1 or any(plan.backend for plan in plans):  # `ddp` always needs a group
        # Ranks use this group only to wait for each other, which takes no CPU or GPU time. Each run
        # has its own group (`group_of`) with its own timeout.
        join_group(spec["rendezvous"], world_size, rank)
        offset = offset_to_rank_0()
        for plan, job in jobs:
            make_groups(plan, saves=bool(job["checkpoints"]))
    origin = float(spec["origin_seconds"]) - offset.seconds  # rank 0's origin on this rank's clock

    gc.freeze()  # exclude torch's objects, which stay alive, from later collections
    gc.enable()
    for plan, job in jobs:
        deadline = job["deadline_seconds"]
        if deadline is not None and _is_over(origin + deadline, world_size):
            break
        if rank < plan.world_size:
            _train_one(job, plan, rank, origin, offset, board)
        board.post(rank, "idle", NEVER)
        _clean_up()
        if world_size > 1:
            dist.barrier()
        board.post(rank, "start", NEVER)
    board.post(rank, "end", NEVER)


def _train_one(
    job: dict[str, Any], plan: Plan, rank: int, origin: float, offset: Offset, board: StatusBoard
) -> None:
    """Run one job and record it. The last event records the outcome."""
    attempt = f".{job['attempt']}" if job["attempt"] else ""  # each attempt has its own event file
    writer = EventWriter(Path(job["events"], f"rank{rank}{attempt}.jsonl"))

    def emit(event: str, **fields: Any) -> None:
        writer.write([{"event": event, "time": round(time.perf_counter() - origin, 6), **fields}])

    here = plan.ranks[rank]
    emit(
        "start",
        rank=rank,
        local_rank=here.local_rank,
        pid=os.getpid(),
        devices=[device.name for device in here.devices],
        node=here.node,
        clock_offset_seconds=round(offset.seconds, 6),
        clock_uncertainty_seconds=round(offset.uncertainty, 6),
        unix_seconds=time.time(),
        torch=torch.__version__,
    )
    _raised.clear()
    try:
        workload = _load(plan.workload)
        policy = CheckpointPolicy(**job["checkpoints"]) if job["checkpoints"] else None
        extras = Extras(**{name: Path(path) for name, path in job["extras"].items()}, policy=policy)
        complete = train(workload, plan, rank, writer, origin, extras, board)
    except BaseException as error:
        try:
            trace = traceback.format_exc()
            # torch turns an exception in a callback into a RuntimeError, even `Stopped`.
            stopped = isinstance(error, Stopped) or _raised.is_set()
            # The launcher stops the ranks one at a time, so this rank may lose its connection
            # to a stopped rank before its own order arrives.
            if not stopped and is_victim(str(error), trace):
                time.sleep(STOP_SECONDS)
        except Stopped:
            stopped = True
        with suppress(OSError):  # the disk may be full; the launcher also gets the exit code
            if not stopped:
                kind = "" if isinstance(error, ParalabError) else f"{type(error).__name__}: "
                detail = their_lines(error, user_folder(plan.workload))
                emit("error", error=f"{kind}{error}", detail=detail, traceback=trace)
            emit("end", status="interrupted" if stopped else "failed")
            writer.close()
        if stopped:
            raise Stopped from error
        raise
    emit("end", status="completed" if complete else "stopped")
    writer.close()


@cache
def _load(name: str) -> Workload:
    """Load the workload without garbage collection, because imported modules stay alive anyway."""
    gc.disable()
    try:
        return load_workload(name)
    finally:
        gc.freeze()
        gc.enable()


def _is_over(deadline: float, world_size: int) -> bool:
    """Return whether the deadline has passed. Rank 0 decides, because all ranks must agree."""
    over = torch.tensor(time.perf_counter() > deadline)
    if world_size > 1:
        dist.broadcast(over, 0)
    return bool(over)


def _clean_up() -> None:
    """Reset state between runs: the default dtype, cached memory, and the peak memory."""
    torch.set_default_dtype(torch.float32)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


_stopping = threading.Event()  # the launcher asked this rank to stop
_raised = threading.Event()  # `Stopped` was raised in the main thread


def _stop() -> None:
    """Send this process a real signal, which interrupts the main thread even while it waits."""
    _stopping.set()
    signal.siginterrupt(signal.SIGTERM, True)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _raise_if_stopping() -> None:
    """Handle SIGTERM in the main thread. Ignore the signal unless the launcher sent it."""
    if _stopping.is_set():
        _stopping.clear()
        _raised.set()
        raise Stopped


if __name__ == "__main__":
    main()
