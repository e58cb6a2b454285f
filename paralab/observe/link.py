"""Run as one of two ranks: report what torch can do, and time an all-reduce between the ranks.

python -m paralab.observe.link '{"rank": 0, "store": FILE, "backend": "gloo", "device": null,
"bytes": 26214400, "seconds": 10}'

This prints each JSON object as soon as it is known, because the next test may hang or crash.
"""

import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMES = 5


def main() -> None:
    question = json.loads(sys.argv[1])
    if hasattr(signal, "alarm"):
        signal.alarm(int(question["seconds"]) + 1)  # kills this process even inside a collective
    _say(torch=_describe_torch())
    _say(link=_all_reduce(**question))


def _say(**parts: Any) -> None:
    print(json.dumps(parts), flush=True)


def _describe_torch() -> dict[str, Any]:
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            memory, processors = gpu.total_memory, gpu.multi_processor_count
            gpus.append({"name": gpu.name, "memory_bytes": memory, "processors": processors})
    names = ("gloo", "nccl") if dist.is_available() else ()
    backends = [name for name in names if dist.is_backend_available(name)]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "backends": backends,
        "gpus": gpus,
        "threads": torch.get_num_threads(),
    }


def _all_reduce(
    rank: int, store: str, backend: str, device: int | None, bytes: int, seconds: float
) -> dict[str, Any]:
    """Time an all-reduce between two ranks, and a copy of the same number of bytes within each."""
    where = torch.device("cpu") if device is None else torch.device("cuda", device)
    if device is not None:
        torch.cuda.set_device(where)
    rendezvous = dist.FileStore(store, 2)  # type: ignore[attr-defined]
    limit = timedelta(seconds=seconds)
    dist.init_process_group(backend, store=rendezvous, rank=rank, world_size=2, timeout=limit)
    here, there = torch.ones(bytes // 4, device=where), torch.empty(bytes // 4, device=where)

    def finished(work: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            work()
            if device is not None:
                torch.cuda.synchronize(where)

        return run

    reduced = _measure_seconds(finished(lambda: dist.all_reduce(here)))
    copied = _measure_seconds(finished(lambda: there.copy_(here)))
    dist.destroy_process_group()
    return {"bytes": bytes, "seconds": reduced, "copy_seconds": copied}


def _measure_seconds(work: Callable[[], None]) -> float:
    work()  # the first call connects and touches the memory
    durations = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        work()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations)


if __name__ == "__main__":
    main()
