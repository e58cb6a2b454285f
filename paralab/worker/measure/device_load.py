"""Sample load and memory while a rank trains, like `nvidia-smi` and `top`."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch

from paralab.machine.host import resident_bytes
from paralab.plan.plan import RankPlan
from paralab.worker.measure.nvml import Nvml
from paralab.worker.measure.probes import Probe

EVERY_SECONDS = 0.1


class LoadSampler:
    """Writes `load` events. It reads only system counters, so it never waits for a device."""

    def __init__(self, rank: RankPlan, probe: Probe) -> None:
        self.probe = probe
        names = dict.fromkeys(device.torch for device in rank.devices)
        self.gpus = [name for name in names if name.startswith("cuda")]
        self.nvml = Nvml(self.gpus)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="paralab-load", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        wall, cpu, waited = time.perf_counter(), time.process_time(), waited_seconds()
        while not self._done.wait(EVERY_SECONDS):
            wall_now, cpu_now, waited_now = (
                time.perf_counter(),
                time.process_time(),
                waited_seconds(),
            )
            share, waiting = (cpu_now - cpu) / (wall_now - wall), None
            if waited is not None and waited_now is not None:
                waiting = round(max(0.0, waited_now - waited) / (wall_now - wall), 3)
            wall, cpu, waited = wall_now, cpu_now, waited_now
            reason = {"not_measured": self.nvml.reason} if self.nvml.reason else {}
            fields = {"cpu_share": round(share, 3), "waiting_threads": waiting}
            fields |= {"rss_bytes": resident_bytes()}
            devices = [
                {"device": device, "allocated_bytes": torch.cuda.memory_allocated(device)}
                | self.nvml.read(device)
                for device in self.gpus
            ]
            self.probe.emit("load", **fields, devices=devices, **reason)


def waited_seconds() -> float | None:
    """Return how long this process's threads could have run but had no core, or None if the system
    does not tell (only Linux does). A thread that sleeps, or waits for data, does not count."""
    try:
        threads = list(Path("/proc/self/task").iterdir())
        waits = [int((each / "schedstat").read_text().split()[1]) for each in threads]
    except (OSError, ValueError, IndexError):
        return None
    return sum(waits) / 1e9
