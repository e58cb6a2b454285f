"""Facts about this host that need no torch: cores, memory, names. What cannot be known is None."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """What paralab runs on. `torch` and everything after it are told by a child process that imported torch."""

    cores: int
    memory_bytes: int | None
    cpu: str
    system: str
    python: str
    torch: str
    cuda: str | None
    gpus: tuple[Gpu, ...]
    backends: tuple[str, ...]
    no_gpu_reason: str | None


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, cut by a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota_file = Path("/sys/fs/cgroup/cpu.max")  # "200000 100000" = two cores, "max 100000" = no limit
    if quota_file.is_file():
        quota, _, period = quota_file.read_text().partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def memory_bytes() -> int | None:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def threads_asked() -> int | None:
    """OMP_NUM_THREADS, the convention for "so many threads per process"."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() and int(value) > 0 else None


def loopback() -> str | None:
    """The name of the interface that ranks of one machine meet on (a host name may not resolve, a VPN may interfere)."""
    names = {path.name for path in Path("/sys/class/net").glob("*")} if Path("/sys/class/net").is_dir() else set()
    return "lo" if "lo" in names else "lo0" if platform.system() == "Darwin" else None
