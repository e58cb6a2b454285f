"""Sample load and memory while a rank trains, like `nvidia-smi` and `top`."""

from __future__ import annotations

import threading
import time

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
        wall, cpu = time.perf_counter(), time.process_time()
        while not self._done.wait(EVERY_SECONDS):
            wall_now, cpu_now = time.perf_counter(), time.process_time()
            share = (cpu_now - cpu) / (wall_now - wall)
            wall, cpu = wall_now, cpu_now
            reason = {"not_measured": self.nvml.reason} if self.nvml.reason else {}
            fields = {"cpu_share": round(share, 3), "rss_bytes": resident_bytes()}
            devices = [
                {"device": device, "allocated_bytes": torch.cuda.memory_allocated(device)}
                | self.nvml.read(device)
                for device in self.gpus
            ]
            self.probe.emit("load", **fields, devices=devices, **reason)
