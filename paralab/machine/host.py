"""Facts about this host that need no torch: cores, memory, names. What cannot be known is None."""

from __future__ import annotations

import os
import platform
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

FULL_BYTES = 1 << 20  # a disk with less room than this is full


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """What paralab runs on. `torch` and everything after it are told by a child process that
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


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, cut by a container's CPU quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota_file = Path(
        "/sys/fs/cgroup/cpu.max"
    )  # "200000 100000" = two cores, "max 100000" = no limit
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
    """The name of the interface that ranks of one machine meet on (a host name may not resolve, a
    VPN may interfere)."""
    names = (
        {path.name for path in Path("/sys/class/net").glob("*")}
        if Path("/sys/class/net").is_dir()
        else set()
    )
    return "lo" if "lo" in names else "lo0" if platform.system() == "Darwin" else None


def host_mark() -> str:
    """Tells this machine, as it is booted now, from every other; two names of one machine have the
    same."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.is_file() else platform.node()


def clock_mark() -> str:
    """Processes with the same one share a monotonic clock: it is the machine's, unless a time
    namespace shifts it."""
    namespace = Path("/proc/self/ns/time")
    return f"{host_mark()} {os.readlink(namespace) if namespace.exists() else ''}"


def address_towards(address: str) -> str | None:
    """The address of this machine from which `address` is reached. Nothing is sent: a UDP socket
    only looks the route up."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(address), 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this IPv4 address; None where the system does not
    tell."""
    try:
        from fcntl import ioctl
    except ImportError:  # Windows
        return None
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = ioctl(
                    probe, 0x8915, struct.pack("256s", name.encode()[:15])
                )  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
