"""Inside one rank: read the spec, join the others, train, and leave a clear end.

python -m paralab.worker SPEC.json          (started by paralab.launch; RANK says which rank this is)
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # what an import makes stays; looking through it for garbage is a third of the time that torch takes to load

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from paralab.errors import ParalabError
from paralab.machine.host import name_process
from paralab.machine.signals import leave_to_the_launcher
from paralab.plan.plan import Plan
from paralab.record.checkpoints import CheckpointPolicy
from paralab.record.stack_dump import leave_words
from paralab.record.status_board import StatusBoard
from paralab.record.writer import EventWriter
from paralab.worker.checkpoint import make_group
from paralab.worker.clock_alignment import ALIGNED, Offset, offset_to_rank_0
from paralab.worker.groups import make_groups
from paralab.worker.loop import Extras, train
from paralab.worker.rendezvous import join_group
from paralab.worker.status import Pulse, obey_the_launcher
from paralab.workload.load import load_workload, their_lines
from paralab.workload.reference import user_folder
from paralab.workload.workload import Workload

EXIT_CODES = {"completed": 0, "stopped": 0, "failed": 1, "interrupted": 130}


class Stopped(BaseException):
    """The launcher asked this rank to stop."""


def main() -> NoReturn:
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    name_process(f"rank {rank}")  # its command line is that of the process it was forked from
    leave_to_the_launcher(_raise_if_told)
    testimony = Path(spec["testimonies"], f"rank{rank}")
    obey_the_launcher(testimony, _stop)
    status = "completed"
    try:
        _train_all(spec, rank)
    except Stopped:
        status = "interrupted"
    except BaseException as error:
        status = "failed"
        leave_words(testimony, error)
        with suppress(OSError):  # the log may be on a full disk
            traceback.print_exc()
    if status == "completed" and any(
        "nccl" in (job["plan"]["backend"] or "") for job in spec["jobs"]
    ):
        dist.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # Not sys.exit: after a failure threads of the pipeline and of gloo still wait for ranks that
    # will not come, and after a success taking gloo's threads down has been seen to abort
    # ("terminate called without an active exception").
    os._exit(EXIT_CODES[status])


def _train_all(spec: dict[str, Any], rank: int) -> None:
    """Every job of the spec, one after the other, in the same processes. Ranks that a job does not
    need wait for the others."""
    plans = [Plan.from_json(job["plan"]) for job in spec["jobs"]]
    world_size = int(os.environ["WORLD_SIZE"])
    pulse = Pulse(StatusBoard(Path(spec["board"]), world_size), rank)
    offset = ALIGNED
    if world_size > 1 or any(
        plan.backend for plan in plans
    ):  # also `ddp` with one replica needs a group
        # This group only makes the ranks wait for one another, which takes neither a core nor a
        # GPU; every training has a group of its own (`group_of`), with a patience of its own.
        join_group(spec["meeting"], world_size, rank)
        offset = offset_to_rank_0()
        make_groups(plans)
        for plan, job in zip(plans, spec["jobs"], strict=True):
            if job["keeping"]:
                make_group(plan)
    origin = float(spec["origin_seconds"]) - offset.seconds  # rank 0's, on this rank's clock
    gc.freeze()  # what is here now stays: collecting garbage between trainings need not look at all of torch
    gc.enable()
    workloads: dict[str, Workload] = {}
    for plan, job in zip(plans, spec["jobs"], strict=True):
        if job["deadline_seconds"] is not None and _is_over(
            origin + job["deadline_seconds"], world_size
        ):
            break
        if rank < plan.world_size:
            with _recorded(_events_file(job, rank), plan, rank, origin, offset) as record:
                if plan.workload not in workloads:
                    workloads[plan.workload] = _loaded(plan.workload)
                extras = Extras(
                    **{name: Path(path) for name, path in job["extras"].items()},
                    keeping=CheckpointPolicy(**job["keeping"]) if job["keeping"] else None,
                )
                record.whole = train(
                    workloads[plan.workload], plan, rank, record.writer, origin, extras, pulse
                )
        pulse.enter("idle")
        _tidy()
        if world_size > 1:
            dist.barrier()
        pulse.enter("start")
    pulse.enter("end")


def _loaded(name: str) -> Workload:
    """What the user's file imports stays, as torch does."""
    gc.disable()
    try:
        return load_workload(name)
    finally:
        gc.freeze()
        gc.enable()


def _events_file(job: dict[str, Any], rank: int) -> Path:
    """Every attempt at a training has its own: nothing is overwritten."""
    attempt = f".{job['attempt']}" if job["attempt"] else ""
    return Path(job["events"], f"rank{rank}{attempt}.jsonl")


def _is_over(deadline: float, world_size: int) -> bool:
    """Rank 0's clock decides for all: the others may be a moment later."""
    over = torch.tensor(time.perf_counter() > deadline)
    if world_size > 1:
        dist.broadcast(over, 0)
    return bool(over)


def _tidy() -> None:
    """Leave nothing of one training to the next: neither memory nor its peak, nor fp64 as the type
    of a workload's new data."""
    torch.set_default_dtype(torch.float32)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


@dataclass
class Record:
    """A training's event file, and whether the training came to its end."""

    writer: EventWriter
    whole: bool = True


@contextmanager
def _recorded(path: Path, plan: Plan, rank: int, origin: float, offset: Offset) -> Iterator[Record]:
    """This rank's event file: it begins with who we are, and ends with how it ended."""
    writer = EventWriter(path)
    record = Record(writer)

    def emit(event: str, **fields: Any) -> None:
        writer.write([{"event": event, "time": round(time.perf_counter() - origin, 6), **fields}])

    here = plan.ranks[rank]
    who = {
        "rank": rank,
        "local_rank": here.local_rank,
        "pid": os.getpid(),
        "devices": [device.name for device in here.devices],
    }
    clock = {
        "clock_offset_seconds": round(offset.seconds, 6),
        "clock_uncertainty_seconds": round(offset.uncertainty, 6),
    }
    emit("start", **who, node=here.node, **clock, unix_seconds=time.time(), torch=torch.__version__)
    try:
        yield record
    except Stopped:
        with suppress(OSError):
            emit("end", status="interrupted")
            writer.close()
        raise
    except BaseException as error:
        text = str(error) if isinstance(error, ParalabError) else f"{type(error).__name__}: {error}"
        detail = their_lines(error, user_folder(plan.workload))
        with suppress(OSError):  # the disk may be full: the launcher hears of it in another way
            emit("error", error=text, detail=detail, traceback=traceback.format_exc())
            emit("end", status="failed")
            writer.close()
        raise
    emit("end", status="completed" if record.whole else "stopped")
    writer.close()


_told_to_stop = threading.Event()


def _stop() -> None:
    """In the side thread that listens to the launcher. A real signal wakes the main thread where it
    sleeps or waits."""
    _told_to_stop.set()
    signal.siginterrupt(signal.SIGTERM, True)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _raise_if_told() -> None:
    """In the main thread, at a SIGTERM: one from elsewhere is not for this rank."""
    if _told_to_stop.is_set():
        _told_to_stop.clear()
        raise Stopped


if __name__ == "__main__":
    main()
