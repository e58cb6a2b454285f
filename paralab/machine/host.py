"""Properties of this machine that can be found without torch: cores, memory, and names. Unknown
values are None.

Most functions use Linux interfaces. macOS has no /proc, /sys, or core affinity, so each function
has a fallback or returns None there.
"""

import os
import platform
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FULL_BYTES = 1 << 20  # treat a disk with less free space as full


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """The machine that paralab runs on. `torch` and all later fields come from a child process that
    imported torch."""

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
    nccl: tuple[int, ...] = ()  # NCCL's version


def core_numbers() -> list[int]:
    """Return the cores that this process is bound to; none without core affinity (macOS)."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def usable_cores() -> int:
    """Return how many cores the affinity mask and the container's CPU quota allow."""
    cores = len(core_numbers()) or os.cpu_count() or 1
    # "200000 100000" means two cores, and "max 100000" means no limit.
    quota_file = Path("/sys/fs/cgroup/cpu.max")
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
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
            return done.stdout.strip()
    return platform.processor() or platform.machine()


def resident_bytes() -> int | None:
    """Return this process's current memory use, or None if only its peak is known (macOS)."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return None
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int | None:
    """Return this process's peak memory use, including Python and libraries."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux reports KiB


def name_process(name: str) -> None:
    """Set the process name that `ps` and `top` show, if the system supports it (Linux)."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def threads_asked() -> int | None:
    """Return OMP_NUM_THREADS, which conventionally sets the number of threads per process."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() and int(value) > 0 else None


def loopback() -> str | None:
    """Return the network interface for ranks on the same machine: `lo`, or `lo0` on macOS. A host
    name may not resolve, and a VPN may interfere with other interfaces."""
    with suppress(OSError):
        names = {name for _, name in socket.if_nameindex()}
        return next((name for name in ("lo", "lo0") if name in names), None)
    return None


def host_mark() -> str:
    """Return an ID of this machine. It changes at each boot and does not depend on host names."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.is_file() else platform.node()


def clock_mark() -> str:
    """Return an ID of the monotonic clock: one per machine, unless a time namespace shifts it."""
    namespace = Path("/proc/self/ns/time")
    return f"{host_mark()} {os.readlink(namespace) if namespace.exists() else ''}"


def address_towards(address: str) -> str | None:
    """Return this machine's address on the route to another. Connecting a UDP socket does not send
    data."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(address), 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
