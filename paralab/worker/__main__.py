"""Inside one rank: read the spec, join the others, train, and leave a clear end.

python -m paralab.worker SPEC.json          (started by paralab.launch; RANK says which rank this is)
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from paralab.errors import ParalabError
from paralab.plan.plan import Plan
from paralab.record.writer import EventWriter
from paralab.worker.lifeline import end_with_the_parent
from paralab.worker.loop import Extras, train
from paralab.workload.load import load_workload, their_lines
from paralab.workload.reference import user_folder
from paralab.workload.workload import Workload

FAILED, INTERRUPTED = 1, 130
PATIENCE_SECONDS = 600  # how long a rank waits for another one, to meet and in every collective


class Stopped(BaseException):
    """The launcher asked this rank to stop."""


def main() -> NoReturn:
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    end_with_the_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which stops all ranks in order
    signal.signal(signal.SIGTERM, _stop)
    writer = EventWriter(Path(spec["events"]) / f"rank{rank}.jsonl")
    origin = float(spec["origin_seconds"])
    status = "completed"

    def emit(event: str, **fields: Any) -> None:
        writer.write([{"event": event, "time": round(time.perf_counter() - origin, 6), **fields}])

    try:
        _train_all(spec, rank, writer, emit)
    except Stopped:
        status = "interrupted"
    except BaseException as error:
        status = "failed"
        text = str(error) if isinstance(error, ParalabError) else f"{type(error).__name__}: {error}"
        detail = their_lines(error, user_folder(spec["jobs"][0]["plan"]["workload"]))
        traceback.print_exc()
        with suppress(OSError):  # the disk may be full; the log then has it, or nobody
            emit("error", error=text, detail=detail, traceback=traceback.format_exc())
    with suppress(OSError):
        emit("end", status=status)
    writer.close()
    if status == "completed" and dist.is_initialized() and "nccl" in dist.get_backend():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after a failure threads of the pipeline and of gloo still wait for ranks that will not come, and after a
    # success taking gloo's threads down has been seen to abort ("terminate called without an active exception").
    os._exit({"completed": 0, "failed": FAILED, "interrupted": INTERRUPTED}[status])


def _train_all(spec: dict[str, Any], rank: int, writer: EventWriter, emit: Callable[..., None]) -> None:
    """Every job of the spec, one after the other, in one process group."""
    plans = [Plan.from_json(job["plan"]) for job in spec["jobs"]]
    _join(plans[0], rank, spec["meeting"], emit)
    workloads: dict[str, Workload] = {}
    for plan, job in zip(plans, spec["jobs"], strict=True):
        if job.get("case") is not None:
            emit("case", case=job["case"])
        if plan.workload not in workloads:
            workloads[plan.workload] = load_workload(plan.workload)
        keep = {name: Path(path) for name, path in job["extras"].items() if path}
        train(workloads[plan.workload], plan, rank, writer, float(spec["origin_seconds"]), Extras(**keep))
        emit("trained")
        if plan.backend:
            dist.barrier()


def _join(plan: Plan, rank: int, meeting: str, emit: Callable[..., None]) -> None:
    """Say who we are, and meet the other ranks."""
    here = plan.ranks[rank]
    devices = [device.name for device in here.devices]
    who = {"rank": rank, "local_rank": here.local_rank, "pid": os.getpid(), "devices": devices}
    emit("start", **who, unix_seconds=time.time(), torch=torch.__version__)
    if not plan.backend:
        return
    if plan.device == "cuda":
        torch.cuda.set_device(here.devices[0].torch)
    patience = timedelta(seconds=PATIENCE_SECONDS)
    dist.init_process_group(plan.backend, f"file://{meeting}", patience, plan.world_size, rank)


def _stop(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped


if __name__ == "__main__":
    main()
